"""What is chosen from measured speeds."""

from __future__ import annotations

import pytest

from vllm_bpd.confidence import parse_schedule
from vllm_bpd.tuning import OFF, Setting, as_options, as_ranges, choose, choose_settings, ratio


def test_the_fastest_setting_is_chosen_by_its_median() -> None:
    speeds = {0.1: [10.0, 99.0, 10.0], 0.5: [12.0, 12.0, 1.0], 1.0: [11.0, 11.0, 11.0]}
    assert choose(speeds, off=1.0) == 0.5


def test_off_is_chosen_where_nothing_is_faster() -> None:
    assert choose({0.1: [11.0], 0.5: [9.0], 1.0: [11.0]}, off=1.0) == 1.0
    assert choose({4: [11.0], 0: [12.0]}, off=0) == 0


HEADS, TEXT = Setting(0.1, heads=True), Setting(0.5, heads=False)


def test_heads_that_rest_in_one_batch_rest_in_larger_ones() -> None:
    measured = {
        1: {HEADS: [3.0], TEXT: [2.0], OFF: [1.0]},
        4: {HEADS: [2.0], TEXT: [3.0], OFF: [1.0]},
        8: {HEADS: [9.0], TEXT: [2.0], OFF: [1.0]},
        16: {HEADS: [9.0], TEXT: [1.0], OFF: [2.0]},
    }
    chosen = choose_settings(measured)
    assert chosen == {1: HEADS, 4: TEXT, 8: TEXT, 16: OFF}
    assert as_options(chosen, longest=64) == {
        "min_confidence_per_batch_size": [(1, 2, 0.1), (3, 11, 0.5), (12, 64, 1.0)],
        "heads_up_to_batch_size": 2,
    }


def test_heads_that_always_pay_need_no_limit() -> None:
    assert as_options({1: HEADS, 8: HEADS}, longest=64) == {
        "min_confidence_per_batch_size": [(1, 64, 0.1)]
    }
    assert as_options({1: TEXT}, longest=4)["heads_up_to_batch_size"] == 0


def test_settings_have_names() -> None:
    assert [str(one) for one in (HEADS, TEXT, OFF)] == ["heads 0.1", "text 0.5", "off"]


def test_ratios_compare_within_a_round() -> None:
    speeds = {0.1: [20.0, 10.0, 30.0], 1.0: [10.0, 5.0, 30.0]}
    assert ratio(speeds, 0.1, off=1.0) == 2.0


def test_borders_are_geometric_means_and_equal_neighbours_join() -> None:
    chosen = {1: 0.1, 2: 0.1, 4: 0.3, 8: 0.3, 16: 0.6, 32: 1.0}
    assert as_ranges(chosen, longest=256) == [
        (1, 2, 0.1), (3, 11, 0.3), (12, 22, 0.6), (23, 256, 1.0)
    ]  # fmt: skip


def test_the_last_range_reaches_the_largest_measured_batch() -> None:
    assert as_ranges({1: 4, 8: 0}, longest=4) == [(1, 2, 4), (3, 8, 0)]


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, 3, 7, 100), (2, 9)])
def test_ranges_are_a_schedule_without_gaps(sizes: tuple[int, ...]) -> None:
    ranges = as_ranges({size: 1 / (size + 1) for size in sizes}, longest=128)
    schedule = parse_schedule(ranges, default=0.0)
    assert ranges[0][0] == 1
    assert [schedule.at(size) for size in sizes] == [1 / (size + 1) for size in sizes]
