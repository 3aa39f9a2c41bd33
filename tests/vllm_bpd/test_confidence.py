"""How sure a draft must be, by batch size."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_bpd.confidence import ConfidenceSchedule, parse_schedule
from vllm_bpd.errors import HeadsError


def test_without_entries_one_confidence_holds_for_every_batch() -> None:
    schedule = parse_schedule(None, 0.1)
    assert [schedule.at(size) for size in (1, 2, 1000)] == [0.1] * 3


def test_each_range_has_its_own_and_the_last_goes_on() -> None:
    schedule = parse_schedule([[1, 1, 0.1], [2, 4, 0.5], [5, 8, 1]], 0.2)
    assert [schedule.at(size) for size in (1, 2, 4, 5, 8, 9, 500)] == [0.1, 0.5, 0.5, 1, 1, 1, 1]
    assert schedule == ConfidenceSchedule((1, 4, 8), (0.1, 0.5, 1.0))


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], "found no entry"),
        ([[1, 2]], "found [1, 2]"),
        ([[2, 4, 0.1]], "found a range from 2 to 4; expected one that starts at 1"),
        ([[1, 4, 0.1], [6, 8, 0.1]], "found a range from 6 to 8; expected one that starts at 5"),
        ([[1, 4, 0.1], [4, 8, 0.1]], "found a range from 4 to 8; expected one that starts at 5"),
        ([[1, 0, 0.1]], "found a range from 1 to 0"),
        ([[1, 4, 1.1]], "found confidence 1.1"),
        ([[1, 4, -0.1]], "found confidence -0.1"),
        ([[1, 4, float("nan")]], "found confidence nan"),
    ],
)
def test_a_wrong_schedule_is_refused_in_one_line(entries: Any, found: str) -> None:
    with pytest.raises(HeadsError) as refused:
        parse_schedule(entries, 0.1)
    message = str(refused.value)
    assert message.startswith(f"min_confidence_per_batch_size: {found}")
    assert "\n" not in message
