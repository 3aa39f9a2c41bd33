"""A guard on what drafting costs: operators dispatched, never seconds.

A step of a small model takes milliseconds, and each operator some microseconds, whatever it does.
More than is written here is a slower step: lower a number when one is saved, and raise it only for
something that is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.vllm_bpd.samples import heads_config, random_heads
from vllm_bpd.lattice import CANDIDATES, NUM_WEIGHTS, draft_block

HEADS, PLACES, WINDOW = 3, 5, 40
HEAD_OPERATORS = 8  # embedding joined, two products, activation, residual
LATTICE_OPERATORS = {"first place": 107, "each further place": 100.5}


class Counted(TorchDispatchMode):
    """Counts every operator that is dispatched inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(work: Callable[[], Any]) -> int:
    """How many operators `work` dispatches."""
    with torch.inference_mode(), Counted() as counted:
        work()
    return int(counted.count)


def lattice_operators(requests: int, places: int) -> int:
    """Of one drafting of the lattice on the device."""
    window_BW = torch.randint(0, 9, (requests, WINDOW))
    ids_BKM = torch.randint(0, 9, (requests, HEADS, CANDIDATES))
    logp_BKM = torch.rand(requests, HEADS, CANDIDATES).log()
    weights_PF = torch.rand(places, NUM_WEIGHTS)
    return operators(lambda: draft_block(window_BW, ids_BKM, logp_BKM, weights_PF))


def head_operators(requests: int) -> int:
    """Of one pass of the heads."""
    config = heads_config()
    heads = random_heads(config)
    hidden_BD: Tensor = torch.randn(requests, config.hidden_size)
    return operators(lambda: heads(hidden_BD, hidden_BD))


def test_more_requests_take_no_more_operators() -> None:
    assert lattice_operators(1, PLACES) == lattice_operators(32, PLACES)
    assert head_operators(1) == head_operators(32)


def test_the_heads_dispatch_no_more_than_they_did() -> None:
    assert head_operators(4) <= HEAD_OPERATORS


def test_the_lattice_dispatches_no_more_than_it_did() -> None:
    first = lattice_operators(4, 1)
    assert first <= LATTICE_OPERATORS["first place"]
    further = (lattice_operators(4, PLACES) - first) / (PLACES - 1)
    assert further <= LATTICE_OPERATORS["each further place"]


@pytest.mark.parametrize("count", [0, 3])
def test_the_guard_counts(count: int) -> None:
    ones = torch.ones(2)
    assert operators(lambda: [ones + 1 for _ in range(count)]) == count
