"""Several engines at once: processes of `bpd-train generate` that share the chunks of one folder.

On GPUs each process sees its own; on a CPU they share the cores.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vllm_bpd.errors import HeadsError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LEAVE_SECONDS = 60  # that a process gets to shut its engine down
_ERROR = re.compile(r"(error|[\w.]*(Error|Exception|Interrupt)): ")


def run_engines(config: Any, finished: Callable[[], int], chunks: int) -> None:
    """Start `config.engines` processes that make the chunks of `config`'s worker; wait for all.

    `config` is a GenerateConfig; `finished` counts the finished ones of its `chunks` chunks.
    Raises HeadsError naming each process that failed, what it said last, and its log; what the
    others made stays.
    """
    from tqdm import tqdm

    environments = engine_environments(config.engines, config.tensor_parallel)
    logs = [
        config.output / f"engine-{config.worker * config.engines + i}.log"
        for i in range(config.engines)
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, (environment, log) in enumerate(zip(environments, logs, strict=True)):
            shared = replace(
                config,
                engines=1,
                worker=config.worker + config.workers * i,
                workers=config.workers * config.engines,
            )
            command = [sys.executable, "-m", "heads_training.cli", "generate", *to_options(shared)]
            with log.open("wb") as sink:
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment},
                        stdin=subprocess.DEVNULL,
                        stdout=sink,
                        stderr=subprocess.STDOUT,
                    )
                )
        logger.info("%d engines started; logs: %s/engine-*.log", config.engines, config.output)
        with tqdm(total=chunks, unit="chunk") as bar:
            for process in processes:
                while _still_running(process):
                    if finished() > bar.n:
                        bar.update(finished() - bar.n)
            bar.update(finished() - bar.n)
    finally:
        _end(processes)
    _report(processes, logs)


def engine_environments(engines: int, gpus_each: int) -> list[dict[str, str]]:
    """Environment variables for each process: its GPUs, or its share of the CPU's cores.

    Raises HeadsError if there are GPUs, but too few.
    """
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        threads = max(1, (os.cpu_count() or 1) // engines)
        # vLLM would bind every process to the same cores.
        values = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        return [{n: os.environ.get(n, v) for n, v in values.items()} for _ in range(engines)]
    if gpus < engines * gpus_each:
        raise HeadsError(
            f"engines: found {engines}, of {gpus_each} GPUs each; expected at most "
            f"{gpus // gpus_each} on a machine with {gpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[i * gpus_each : (i + 1) * gpus_each])}
        for i in range(engines)
    ]


def to_options(config: Any) -> list[str]:
    """The options of `bpd-train generate` that give this GenerateConfig."""
    words = []
    for field in fields(config):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        if field.name == "output":
            words.append(f"--answers={value}")
        elif isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a moment; whether the process is still there."""
    try:
        process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt what still runs, so that engines shut down; kill what does not leave."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        try:
            process.wait(timeout=_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_word(text: str) -> str:
    """The line of a log that says why its process failed: the last error, or the last line.

    Python goes on after an error: with what it finds left over when it ends, for one.
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["no word"])[-1]


def _report(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Raise HeadsError, one line, if any process failed."""
    failed = []
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            why = last_word(log.read_text(encoding="utf-8", errors="replace"))
            failed.append(f"{log} (status {process.returncode}): {why}")
    if failed:
        raise HeadsError(
            f"engines: {len(failed)} of {len(processes)} failed: {'; '.join(failed)}; what was "
            "made is kept, and the same command goes on from there"
        )
