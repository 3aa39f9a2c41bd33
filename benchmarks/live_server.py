"""`vllm serve` processes that stand ready side by side while they take turns."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.contenders import Contender
from vllm_bpd.errors import HeadsError

NAME = "served"  # of the model, whichever the contender
_LEAST_GIB = 5  # servers grow by a tenth or so under load, and the client needs its own
_START_SECONDS = 900  # compiling on a slow machine included


class LiveServer:
    """One contender's server."""

    def __init__(self, contender: Contender, target: str, options: list[str], log: Path) -> None:
        """Start `vllm serve target` for `contender`; its output goes to `log`."""
        self.contender = contender
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", target,
            "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-uvicorn-access-log", *options,
        ]  # fmt: skip
        if contender.speculative is not None:
            command += ["--speculative-config", json.dumps(contender.speculative)]
        self._begin = time.monotonic()
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> float:
        """Seconds from its start until it answers; exit with the end of its log if it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return time.monotonic() - self._begin
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        tail = self.log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{self.contender.name}: the server did not start:\n{tail}")

    def memory_mib(self) -> float:
        """Of all its processes; what several processes share counts in part for each (PSS)."""
        kib = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(status.read_text().rpartition(")")[2].split()[3])
                if session == self.process.pid:
                    kib += proportional_kib(status.with_name("smaps_rollup").read_text())
            except OSError:
                continue  # ended meanwhile
        return kib / 1024

    def stop(self) -> None:
        """End it with all its processes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def require_memory(meminfo: str) -> None:
    """Raise HeadsError if too little memory is left to measure in, by what /proc/meminfo says.

    Without swap, the kernel then drops and reads programs' own pages again and again, and every
    speed is that of the disk.
    """
    left = next(
        int(line.split()[1]) / 2**20
        for line in meminfo.splitlines()
        if line.startswith("MemAvailable:")
    )
    if left < _LEAST_GIB:
        raise HeadsError(
            f"memory: {left:.1f} GiB are left beside the servers; expected {_LEAST_GIB} or more: "
            "let fewer take part with --only"
        )


def proportional_kib(smaps_rollup: str) -> int:
    """The `Pss` of a process, KiB, from what /proc says of its memory."""
    for line in smaps_rollup.splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.split()[0])
    return 0
