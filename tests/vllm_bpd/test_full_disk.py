"""A disk that fills up while heads are written: the older checkpoint stays whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_bpd.samples import heads_config, random_heads
from vllm_bpd.checkpoint import load_heads, save_heads

pytestmark = pytest.mark.row("faults")

# Files of this process may hold no more than so many bytes: the kernel then fails the write, as it
# does on a full disk.
SAVE = """
import resource, signal, sys
from tests.vllm_bpd.samples import heads_config, random_heads
from vllm_bpd.checkpoint import save_heads
from vllm_bpd.errors import HeadsError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
room = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    save_heads(sys.argv[1], random_heads(heads_config(), seed=2))
except HeadsError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("room", [100, 2000], ids=["config", "weights"])
def test_an_older_checkpoint_survives(tmp_path: Path, room: int) -> None:
    """Whichever file there is no room for; nothing half-written is left, and one line says why."""
    heads = random_heads(heads_config(), seed=1)
    save_heads(tmp_path / "heads", heads)
    before = {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path / "heads"), str(room)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'heads'}: cannot be written (")
    assert done.stdout.count("\n") == 1
    after = {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()}
    assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    load_heads(tmp_path / "heads")
