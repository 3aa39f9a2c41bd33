"""A worker on another machine that has not what the front end has ends the start, and says so.

Ray's workers of these engines see another PYTHONPATH than the front end: so much of another
machine can be had on one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from integration_tests.distributed.cases import answered, environment
from integration_tests.distributed.test_executors import BASE, ENGINE, PROMPTS, RAY, sizes
from integration_tests.harness.heads import write_heads
from integration_tests.harness.targets import TARGETS, write_target
from vllm_bpd.arrival import plugin_version

MISSING = "raise ModuleNotFoundError(\"No module named 'vllm_bpd'\", name='vllm_bpd')"
OLDER = "Metadata-Version: 2.1\nName: vllm-bpd\nVersion: 0.0.9\n"
# What shadows the plugin on the workers' machine: a file, its text, and what is then said.
MACHINES = {
    "without the plugin": ("vllm_bpd/__init__.py", MISSING, "not importable (No module named"),
    "an older plugin": ("vllm_bpd-0.0.9.dist-info/METADATA", OLDER, "found 0.0.9; the front end"),
}


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_named(tmp_path: Path, machine: str) -> None:
    """Host, what was found, what is needed; on one line of the engine's log."""
    file, text, said = MACHINES[machine]
    shadow = tmp_path / "shadow" / file
    shadow.parent.mkdir(parents=True)
    shadow.write_text(text)
    path = os.pathsep.join([str(tmp_path / "shadow"), environment(BASE, True)["PYTHONPATH"]])
    target = write_target(TARGETS["llama"], tmp_path / "target")
    write_heads(target, target / "bpd_heads", 2)
    request: dict[str, Any] = {
        "engine": {"model": str(target), **ENGINE},
        "prompts": PROMPTS[:1],
        "max_tokens": 2,
        "cases": {"engine": sizes(tensor=2, backend="ray") | {"speculative_config": "bpd"}},
        "ray": RAY | {"runtime_env": {"env_vars": {"PYTHONPATH": path}}},
    }
    reply = answered(BASE, tmp_path / "run", request)["engine"]
    assert "error" in reply
    log = (tmp_path / "run" / "log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if "speculative method bpd: host" in line]
    assert lines, log[-6000:]
    expected = f"speculative method bpd: host {socket.gethostname()}: vllm-bpd: {said}"
    assert all(expected in line for line in lines)
    assert all(f"install vllm-bpd {plugin_version()} in the" in line for line in lines)
