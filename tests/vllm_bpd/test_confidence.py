"""How sure a draft must be, by batch size."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_bpd.confidence import ON_CPU, ConfidenceSchedule, parse_schedule, schedule
from vllm_bpd.errors import HeadsError


def test_without_entries_one_confidence_holds_for_every_batch() -> None:
    schedule = parse_schedule(None, 0.1)
    assert [schedule.at(size) for size in (1, 2, 1000)] == [0.1] * 3


def test_each_range_has_its_own_and_the_last_goes_on() -> None:
    schedule = parse_schedule([[1, 1, 0.1], [2, 4, 0.5], [5, 8, 1]], 0.2)
    assert [schedule.at(size) for size in (1, 2, 4, 5, 8, 9, 500)] == [0.1, 0.5, 0.5, 1, 1, 1, 1]
    assert schedule == ConfidenceSchedule((1, 4, 8), (0.1, 0.5, 1.0))


def test_on_a_cpu_drafts_have_to_be_surer_as_more_requests_run() -> None:
    assert schedule(None, None, "cpu") == ON_CPU
    lowest = [ON_CPU.at(size) for size in range(1, 300)]
    assert lowest == sorted(lowest)
    assert lowest[0] < lowest[-1] < 1
    assert ON_CPU.heads_up_to in ON_CPU.last_sizes  # alone, the text has to be surer
    assert ON_CPU.sampled_up_to is not None
    assert schedule(None, 0.1, "cpu").sampled_up_to is None  # unless told how sure


def test_what_is_asked_for_holds_on_a_cpu_too() -> None:
    entries = [(1, 4, 0.3), (5, 9, 1.0)]
    assert schedule(entries, None, "cpu") == parse_schedule(entries, 0.0)
    assert schedule(entries, 0.2, "cpu") == parse_schedule(entries, 0.0)
    assert schedule(None, 0.2, "cpu") == ConfidenceSchedule((1,), (0.2,))


def test_elsewhere_verification_is_taken_to_cost_little() -> None:
    assert [schedule(None, None, "cuda").at(size) for size in (1, 400)] == [0.1, 0.1]


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
        ([[1, 4, float("inf")]], "found confidence inf"),
        ([[1, 4, 10**400]], "found confidence 1000"),
        ([[10**400, 5, 0.1]], "found a range from 1000"),
        ([[1, 10**400, 0.1]], "found a range from 1 to 1000"),
        ([[10**5000, 5, 0.1]], "found a range from a value of type int too large to show to 5"),
        ([[1, float("inf"), 0.1]], "found a range from 1 to inf"),
        ([[1, float("nan"), 0.1]], "found a range from 1 to nan"),
        ([[float("nan"), 4, 0.1]], "found a range from nan to 4"),
    ],
)
def test_a_wrong_schedule_is_refused_in_one_line(entries: Any, found: str) -> None:
    with pytest.raises(HeadsError) as refused:
        parse_schedule(entries, 0.1)
    message = str(refused.value)
    assert message.startswith(f"min_confidence_per_batch_size: {found}")
    assert "\n" not in message
