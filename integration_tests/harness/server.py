"""A running `vllm serve`, for as long as a test needs it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from integration_tests.harness.combos import Combo
from integration_tests.harness.engine_process import (
    INTERPRET,
    REPOSITORY,
    engine_environment,
)

START_SECONDS = 420  # for a slow, busy machine


class ServerError(Exception):
    """The server ended or did not answer in time; with the end of its log."""


@dataclass
class Server:
    """A server's combination, process and address."""

    combo: Combo
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_until_healthy(self) -> None:
        """Return once it answers. Raises ServerError if it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        tail = self.log.read_text(errors="replace")[-6000:]
        raise ServerError(f"the server did not start:\n{tail}")

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of /metrics, labels but `position` left out."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        found = {}
        for line in text.splitlines():
            match = re.match(r"vllm:(\w+)\{(.*)\} (\S+)$", line)
            if match:
                position = re.search(r'position="(\d+)"', match[2])
                found[match[1] + (f"[{position[1]}]" if position else "")] = float(match[3])
        return found

    def children(self) -> list[int]:
        """Process ids of the server's own processes, the first one left out."""
        return descendants(self.process.pid)

    def resident(self) -> int:
        """Bytes of memory that all its processes hold."""
        return sum(map(resident, [self.process.pid, *self.children()]))

    def stop(self) -> None:
        """End it, gently first."""
        left = self.children()
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in left:  # what outlived a parent that was killed
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def descendants(pid: int) -> list[int]:
    """Ids of the children of a process, and of theirs."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    children = [int(word) for word in text.split()]
    return children + [pid for child in children for pid in descendants(child)]


def resident(pid: int) -> int:
    """Bytes of memory that a process holds, shared ones by share; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, flags=re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(combo: Combo, target: Path, log: Path, options: Sequence[str]) -> Iterator[Server]:
    """`vllm serve` of the combination's release and model runner, healthy, named `served`."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(target),
        "--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", *options,
    ]  # fmt: skip
    environment = engine_environment(combo)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    if combo.runner == "V2":
        environment["PYTHONPATH"] = f"{INTERPRET}:{environment['PYTHONPATH']}"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdout=sink, stderr=subprocess.STDOUT
        )
    server = Server(combo, process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()
