"""Starts `engines` in a process of its own, and takes its replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration_tests.harness.combos import Combo
from integration_tests.harness.engine_process import (
    INTERPRET,
    JOB_TIMEOUT,
    engine_environment,
)

PRETEND = str(Path(__file__).parent / "pretend")
PROGRAM = "integration_tests.distributed.engines"


def environment(combo: Combo, pretend: bool) -> dict[str, str]:
    """The environment of the engines of `combo`; `pretend` lets a CPU stand in for GPUs."""
    variables = engine_environment(combo)
    del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
    variables.pop("RAY_ADDRESS", None)  # each has a Ray of its own
    variables.update(
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
    )
    paths = [variables["PYTHONPATH"]]
    if combo.runner == "V2":
        paths = [PRETEND, INTERPRET, *paths]
    elif pretend:
        paths = [PRETEND, *paths]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def answered(
    combo: Combo, folder: Path, request: dict[str, Any], seconds: float = JOB_TIMEOUT
) -> dict[str, dict[str, Any]]:
    """The replies to every case of `request`, by name. Whatever happens, no process is left."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(path)],
            env=environment(combo, "ray" in request),
            cwd=folder,  # Ray's workers look into it before their own PYTHONPATH
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            start_new_session=True,
        )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    lines = out.decode(errors="replace").splitlines()
    replies = dict(
        json.loads(line.removeprefix("REPLY ")) for line in lines if line.startswith("REPLY ")
    )
    missing = request["cases"].keys() - replies.keys()
    assert not missing, f"no reply for {missing}:\n{log.read_text(errors='replace')[-6000:]}"
    return replies
