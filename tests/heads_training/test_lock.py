from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heads_training.lock import LOCK_FILE, only_one
from vllm_bpd.errors import HeadsError

pytestmark = pytest.mark.row("faults")

HOLDER = """
import sys, time
from pathlib import Path
from heads_training.lock import only_one
with only_one(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_refuses_and_a_dead_one_lets_go(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(HeadsError) as refused, only_one(folder):
            pass
        assert str(refused.value) == (
            f"work: {folder} is in use: process {first.pid} is training there; wait until it has "
            "ended, or name another folder"
        )
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    with only_one(folder):
        assert (folder / LOCK_FILE).read_text() == str(os.getpid())


def test_the_folder_is_free_again_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad"), only_one(tmp_path):
        raise ValueError("bad")
    with only_one(tmp_path):
        pass
