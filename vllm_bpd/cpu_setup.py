"""What makes vLLM fast on a CPU, and whether it is in place: advice of `vllm-bpd doctor`.

Imports no vLLM. Sources: vLLM's CPU installation guide, and its own start-up warnings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_MAPS = Path("/proc/self/maps")  # the libraries of this process; Linux only


def loaded_libraries() -> str:
    """Paths of the libraries loaded into this process, as one text; empty if unknown."""
    try:
        return _MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def advice(libraries: str, environment: Mapping[str, str], cores: int) -> Sequence[str]:
    """One line a setting; those that begin with `~` cost speed or memory.

    `libraries` as `loaded_libraries` gives them, `cores` as this process may use them.
    """
    return [
        _preloaded(
            libraries,
            "libiomp5",
            "Intel OpenMP",
            "`pip install intel-openmp`, then start vLLM with LD_PRELOAD=PREFIX/lib/libiomp5.so",
        ),
        _preloaded(
            libraries,
            "libtcmalloc",
            "tcmalloc",
            "install libtcmalloc-minimal4 (Debian's name), then start vLLM with its path in "
            "LD_PRELOAD",
        ),
        _kv_cache(environment.get("VLLM_CPU_KVCACHE_SPACE")),
        _threads(environment, cores),
    ]


def report() -> None:
    """Print the advice for this process and machine."""
    cores = len(os.sched_getaffinity(0))
    for line in advice(loaded_libraries(), os.environ, cores):
        print(line)


def _preloaded(libraries: str, name: str, title: str, remedy: str) -> str:
    if name in libraries:
        return f"cpu: {title}: loaded"
    return f"~ cpu: {title}: not loaded, vLLM is slower without; {remedy}"


def _kv_cache(space: str | None) -> str:
    if space:
        return f"cpu: KV cache: {space} GiB (VLLM_CPU_KVCACHE_SPACE)"
    return (
        "~ cpu: KV cache: as large as vLLM guesses from the machine's memory; set "
        "VLLM_CPU_KVCACHE_SPACE to its GiB"
    )


def _threads(environment: Mapping[str, str], cores: int) -> str:
    binding = environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    threads = environment.get("OMP_NUM_THREADS")
    if threads and threads.isdigit() and int(threads) < cores:
        return (
            f"~ cpu: threads: OMP_NUM_THREADS is {threads} of {cores} cores; unset it, unless "
            "other jobs need them"
        )
    return (
        f"cpu: threads: {threads or cores} of {cores} cores (VLLM_CPU_OMP_THREADS_BIND {binding})"
    )
