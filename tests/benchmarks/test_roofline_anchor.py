"""The anchor's arithmetic; its seconds are measured by hand, never by a test."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.roofline import Heads, Machine, Model, draft_seconds, step_seconds
from benchmarks.roofline_anchor import (
    BATCHES,
    BLOCKS,
    COUNT,
    DRAFTING,
    HIDDEN_EACH,
    SCORED,
    compare,
    drafting,
    fastest,
)

TINY = Model("tiny", 3, 4, 2, 1, 2, 8, 10)
MACHINE = Machine("m", flops=20.0, bandwidth=2.0, overhead=5.0)


def test_ratios_are_to_one_token_of_the_same_batch() -> None:
    wanted = (*BLOCKS, DRAFTING)
    seconds = {(batch, block): 1.0 * batch + block for batch in BATCHES for block in wanted}
    points = compare(TINY, MACHINE, 6, seconds)
    assert [(p["batch"], p["block"]) for p in points] == [
        (batch, block) for batch in BATCHES for block in wanted[1:]
    ]
    verified, drafted = points[-2:]
    plain = step_seconds(TINY, MACHINE, 8, 1, 6)
    assert verified["measured"] == round((8 + 9) / (8 + 1), 3)
    assert verified["foretold"] == round(step_seconds(TINY, MACHINE, 8, 9, 6) / plain, 3)
    heads = Heads(COUNT, COUNT * HIDDEN_EACH, SCORED)
    assert drafted["measured"] == round((8 + DRAFTING) / (8 + 1), 3)
    assert drafted["foretold"] == round(draft_seconds(TINY, MACHINE, heads, 8) / plain, 3)


def test_heads_draft_an_id_each() -> None:
    ids_BK = drafting(torch.randn(SCORED + 8, 12), 3)()
    assert isinstance(ids_BK, torch.Tensor)
    assert ids_BK.shape == (3, COUNT)
    assert int(ids_BK.max()) < SCORED


def test_the_quickest_of_all_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0, 8.0, 20.0])  # begin and end, a and b in turn
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks))
    works: dict[tuple[int, int], Callable[[], object]] = {(1, n): lambda: None for n in (1, 2)}
    assert fastest(works, 2) == {(1, 1): 2.0, (1, 2): 1.0}
