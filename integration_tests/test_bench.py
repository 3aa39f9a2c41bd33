"""`make bench` from end to end, on a tiny target (0.32, V1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.contenders import PLAIN
from integration_tests.harness.combos import COMBOS
from integration_tests.harness.engine_process import REPOSITORY, engine_environment
from integration_tests.harness.heads import write_heads
from integration_tests.harness.targets import TARGETS, write_target

pytestmark = (
    pytest.mark.full
)  # two servers and a client: a minute, and nobody's answers depend on it


def test_two_contenders_take_turns_and_are_reported(tmp_path: Path) -> None:
    target = write_target(TARGETS["text"], tmp_path / "target")
    write_heads(target, target / "bpd_heads", 2, places=4)
    environment = engine_environment(COMBOS[0])
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.side_by_side", "--target", str(target),
            "--only", PLAIN, "bpd", "--concurrency", "1", "4", "--rounds", "2",
            "--temperatures", "0", "--max-tokens", "8", "--dtype", "float32",
            "--max-model-len", "500", "--serve=--enforce-eager", "--output", str(tmp_path / "out"),
        ],
        env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    runs = [(row["concurrency"], row["round"], row["contender"]) for row in results["rows"]]
    # Who begins rotates.
    assert runs == [
        (size, number, name)
        for size in (1, 4)
        for number, names in enumerate(((PLAIN, "bpd"), ("bpd", PLAIN)))
        for name in names
    ]
    tokens = {(r["concurrency"], r["round"], r["contender"]): r["tokens"] for r in results["rows"]}
    drafts = {row["contender"]: row["num_drafts"] for row in results["rows"]}
    assert all(
        tokens[size, number, "bpd"] == tokens[size, number, PLAIN] for size, number, _ in runs
    )
    assert drafts[PLAIN] == 0
    assert drafts["bpd"] > 0
    assert "| 4 | bpd |" in (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "bench.svg").stat().st_size > 1000
