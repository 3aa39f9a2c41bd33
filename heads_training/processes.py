"""The processes that a run may be spread over: torchrun's, or this one alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

# One process may write hidden states for hours while the others wait; torch's own is half of one.
_PATIENCE = timedelta(days=7)


def processes() -> Any:
    """accelerate's `PartialState`, with torchrun's process group joined if there is one."""
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available(), timeout=_PATIENCE)


@contextmanager
def main_first() -> Iterator[bool]:
    """The body runs in the first process, then in the others; gives whether this is the first.

    What the first one writes to disk, the others find.
    """
    state = processes()
    with state.main_process_first():
        yield bool(state.is_main_process)


def leave() -> None:
    """Leave the process group, if there is one; every process calls it, when training is over.

    The group's threads end with the last reference to it. Threads that still run when Python ends
    may abort the process, so the caller holds no trainer (its model holds the group) any more.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # what holds the group in a cycle
        torch.distributed.destroy_process_group()
