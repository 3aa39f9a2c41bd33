"""A vLLM engine process: one subprocess for one (release, runner), serving jobs in sequence.

The subprocess has the release's PYTHONPATH and the runner's environment from its first line, so
nothing leaks between combinations. Jobs and replies are JSON lines over two pipes; the engine's
own output goes to a log file, quoted when the process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration_tests.harness.combos import Combo
from integration_tests.harness.releases import find_release

REPOSITORY = Path(__file__).resolve().parents[2]
# With it on PYTHONPATH, model runner V2 runs on a CPU in processes that are not ours to prepare.
INTERPRET = str(REPOSITORY / "integration_tests" / "distributed" / "interpret")
WORKER = "integration_tests.harness.worker"
LOG_TAIL = 4000
# Seconds for one job. A busy machine may need more for interpreted kernels, as pytest's own
# `timeout` may have to be raised with it.
JOB_TIMEOUT = float(os.environ.get("VLLM_BPD_JOB_TIMEOUT", "580"))


class EngineProcessError(Exception):
    """The engine process died or did not answer in time."""


def engine_environment(combo: Combo) -> dict[str, str]:
    """The environment variables of an engine process for `combo`."""
    release = find_release(combo.release)
    paths = [release.python_path, str(REPOSITORY), os.environ.get("PYTHONPATH")]
    environment = dict(os.environ)
    environment.update(
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
        VLLM_USE_V2_MODEL_RUNNER="1" if combo.runner == "V2" else "0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    # vLLM remembers what it learned of a model class in one file, whichever release it is: taking
    # turns, they would learn it anew at every start, for ten seconds.
    own = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    environment["VLLM_CACHE_ROOT"] = f"{own}-{combo.release}"
    if combo.runner == "V2":
        environment["TRITON_INTERPRET"] = "1"
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file() and "libiomp" not in environment.get("LD_PRELOAD", ""):
        loaded = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{openmp}:{loaded}" if loaded else str(openmp)
    return environment


class EngineProcess:
    """A live engine process; `run` sends it one job and returns its reply."""

    def __init__(self, combo: Combo, log: Path) -> None:
        """Start the process for `combo`; its engine output goes to `log`."""
        self.combo = combo
        self.log = log
        self.environment = engine_environment(combo)
        self.start()

    def start(self) -> None:
        """Start the process; also called for a new one when the last has died."""
        jobs_read, jobs_write = os.pipe()
        replies_read, replies_write = os.pipe()
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(jobs_read), str(replies_write)],
                env=self.environment,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=(jobs_read, replies_write),
            )
        os.close(jobs_read)
        os.close(replies_write)
        self.jobs = os.fdopen(jobs_write, "w", encoding="utf-8")
        self.replies = os.fdopen(replies_read, "rb", buffering=0)
        self.pending = b""

    def run(self, job: dict[str, Any], timeout: float = JOB_TIMEOUT) -> dict[str, Any]:
        """Run one job (see `worker.run_job`) and return its reply."""
        if self.process.poll() is not None:
            self.close()
            self.start()
        try:
            self.jobs.write(json.dumps(job) + "\n")
            self.jobs.flush()
        except BrokenPipeError:
            raise EngineProcessError(self.describe_death()) from None
        return dict(json.loads(self.read_line(timeout)))

    def read_line(self, timeout: float) -> bytes:
        """The next reply line; the process is ended if none comes in `timeout` seconds."""
        while b"\n" not in self.pending:
            if not select.select([self.replies], [], [], timeout)[0]:
                self.process.kill()
                raise EngineProcessError(f"no answer in {timeout} s; {self.describe_death()}")
            chunk = self.replies.read(1 << 20)
            if not chunk:
                raise EngineProcessError(self.describe_death())
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def describe_death(self) -> str:
        """How the process ended, with the end of its log."""
        status = self.process.wait(timeout=30)
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return f"engine process {self.combo.name} ended with status {status}:\n{tail}"

    def close(self) -> None:
        """End the process: closing its job pipe makes it leave; it is killed if it lingers."""
        with contextlib.suppress(BrokenPipeError):
            self.jobs.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
