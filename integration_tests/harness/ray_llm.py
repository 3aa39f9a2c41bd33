"""The examples for Ray's LLM libraries, run as users run them, on the vLLM that Ray pins."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from integration_tests.harness.combos import Combo
from integration_tests.harness.engine_process import REPOSITORY, engine_environment
from integration_tests.harness.server import descendants, free_port

COMBO = Combo("0.29", "V1")
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 512,
}
SECONDS = 600.0  # for an engine to start in Ray, on a slow, busy machine
REQUEST_SECONDS = 120.0
REPLICA = "ServeReplica:default:LLMServer"
NEEDED = ("aiohttp_cors", "opencensus", "smart_open")


def missing() -> list[str]:
    """The modules of the extra `ray-llm` that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


class RayLlmError(Exception):
    """An example ended or did not answer in time; with the end of its output."""


@contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """The variables of an example's process; its Ray keeps to itself and leaves nothing."""
    # Short, for Ray's sockets lie in it, and their names may have 107 characters.
    folder = tempfile.mkdtemp(prefix="bpd-ray-", dir="/tmp")
    environment = engine_environment(COMBO)
    environment.update(
        RAY_TMPDIR=folder,
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        # As on those systems, Ray's own servers then listen on the loopback address alone.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    environment.pop("RAY_ADDRESS", None)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    try:
        yield environment
    finally:
        # The engine of a replica that was killed lives on, and is nobody's child.
        for pid in started_with(f"RAY_TMPDIR={folder}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def started_with(variable: str) -> list[int]:
    """Ids of the processes whose environment had `variable`, as `NAME=value`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End an example, gently first, and whatever it leaves running."""
    left = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=20)  # a replica that is just starting does not listen
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_to_end(name: str, options: Sequence[str], log: Path) -> str:
    """Run `examples/NAME.py` with `options`; its output. Raises RayLlmError if it fails."""
    command = [sys.executable, "-m", f"examples.{name}", *options]
    with ray_environment() as environment, log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(timeout=SECONDS)
        finally:
            end(process)
    output = log.read_text(encoding="utf-8", errors="replace")
    if status != 0:
        raise RayLlmError(f"{name} ended with status {status}:\n{output[-6000:]}")
    return output


@dataclass
class Served:
    """`examples/ray_serve_llm.py` while it serves `model`."""

    process: subprocess.Popen[bytes]
    model: str
    url: str
    metrics_url: str
    log: Path

    def wait_until_ready(self) -> None:
        """Return once it answers. Raises RayLlmError if it ends or takes too long.

        The model is listed before a replica is there, and requests then wait for one.
        """
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                if self.complete("Are you there?", 1)[0] == 200:
                    return
            time.sleep(2)
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-6000:]
        raise RayLlmError(f"the app did not start:\n{tail}")

    def complete(self, prompt: str, max_tokens: int) -> tuple[int, str]:
        """HTTP status of a greedy completion, and its text or what was said instead.

        Status 0: the connection broke. Raises TimeoutError if there is no answer at all.
        """
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                return response.status, json.load(response)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except TimeoutError:
            raise
        except (urllib.error.URLError, OSError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise TimeoutError(str(error)) from None
            return 0, str(error)

    def counter(self, name: str) -> float:
        """The sum over replicas of one of vLLM's speculative counters, from Ray's /metrics."""
        wanted = rf"^ray_vllm\w*spec_decode_num_{name}(?:_total)?(?:\{{.*\}})? (\S+)$"
        return sum(map(float, re.findall(wanted, self.metrics(), flags=re.MULTILINE)))

    def healthy(self) -> int:
        """How many replicas of the model answer requests now, as Ray's /metrics has it."""
        # One series a replica, or one for all, as Ray is told.
        wanted = r"^ray_serve_deployment_replica_healthy\{.*LLMServer.*\} (\S+)$"
        return int(sum(map(float, re.findall(wanted, self.metrics(), flags=re.MULTILINE))))

    def metrics(self) -> str:
        """Ray's /metrics, which it gathers every few seconds."""
        with urllib.request.urlopen(self.metrics_url, timeout=30) as response:
            return str(response.read().decode())

    def replicas(self) -> list[int]:
        """Process ids of the model's replicas."""
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if REPLICA in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                    found.append(pid)
        return found


@contextmanager
def serving(model: Path, log: Path, options: Sequence[str]) -> Iterator[Served]:
    """The example serving `model` on this machine's CPU, ready."""
    port, metrics = free_port(), free_port()
    command = [
        sys.executable, "-m", "examples.ray_serve_llm", "--model", str(model), "--cpu",
        "--port", str(port), "--metrics-port", str(metrics), *options,
    ]  # fmt: skip
    with ray_environment() as environment, log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdout=sink, stderr=subprocess.STDOUT
        )
        address = "http://127.0.0.1"
        served = Served(
            process, str(model), f"{address}:{port}", f"{address}:{metrics}/metrics", log
        )
        try:
            served.wait_until_ready()
            yield served
        finally:
            end(process)
