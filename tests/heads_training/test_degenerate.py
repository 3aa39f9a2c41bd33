"""Loops, cut answers and empty ones are told apart and counted."""

from __future__ import annotations

import pytest

from heads_training.degenerate import count_degenerate, degeneracy, is_loop
from heads_training.records import Record

LOOP = [1, 2, 3] * 20


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        (LOOP, True),
        ([9] * 60, True),
        (list(range(60)), False),
        ([1, 2, 3] * 10, False),  # too short to say
        ([*LOOP, 4], False),
    ],
)
def test_loops(ids: list[int], loop: bool) -> None:
    assert is_loop(ids) is loop


def test_kinds_are_counted() -> None:
    kinds = {
        "loop": Record([1], LOOP, "length", "s"),
        "cut": Record([1], list(range(60)), "length", "s"),
        "empty": Record([1], [], "stop", "s"),
    }
    ended = Record([1], LOOP, "stop", "s")
    assert {kind: degeneracy(record) for kind, record in kinds.items()} == {k: k for k in kinds}
    assert degeneracy(ended) is None
    counts = count_degenerate([*kinds.values(), ended, ended])
    assert counts == {"answers": 5, "answer_tokens": 240, "empty": 1, "loop": 1, "cut": 1}
