"""The anchor's arithmetic; its seconds are measured by hand, never by a test."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from benchmarks.roofline import Machine, Model, step_seconds
from benchmarks.roofline_anchor import BATCHES, BLOCKS, compare, fastest

TINY = Model("tiny", 3, 4, 2, 1, 2, 8, 10)
MACHINE = Machine("m", flops=20.0, bandwidth=2.0, overhead=5.0)


def test_ratios_are_to_one_token_of_the_same_batch() -> None:
    seconds = {(batch, block): 1.0 * batch + block for batch in BATCHES for block in BLOCKS}
    points = compare(TINY, MACHINE, 6, seconds)
    assert [(p["batch"], p["block"]) for p in points] == [
        (batch, block) for batch in BATCHES for block in BLOCKS[1:]
    ]
    last = points[-1]
    assert last["measured"] == round((8 + 9) / (8 + 1), 3)
    foretold = step_seconds(TINY, MACHINE, 8, 9, 6) / step_seconds(TINY, MACHINE, 8, 1, 6)
    assert last["foretold"] == round(foretold, 3)


def test_the_quickest_of_all_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0, 8.0, 20.0])  # begin and end, a and b in turn
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks))
    works: dict[tuple[int, int], Callable[[], object]] = {(1, n): lambda: None for n in (1, 2)}
    assert fastest(works, 2) == {(1, 1): 2.0, (1, 2): 1.0}
