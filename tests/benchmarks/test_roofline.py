"""The roofline model's arithmetic, by hand, on a model of whole numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.roofline import (
    H100,
    LLAMA_70B,
    Heads,
    Machine,
    Model,
    all_reduce_seconds,
    draft_seconds,
    draw,
    fits,
    gain,
    step_seconds,
    table,
)

# A layer has 4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 8 = 48 + 96 numbers, the LM head 40.
TINY = Model("tiny", 3, 4, 2, 1, 2, 8, 10, bytes_each=2)
READS = Machine("reads", flops=1e12, bandwidth=2.0)  # a number a second, products free
MULTIPLIES = Machine("multiplies", flops=2.0, bandwidth=1e12)  # a product a second, reading free


def test_the_sizes_are_those_of_the_real_model() -> None:
    weights = LLAMA_70B.layers * LLAMA_70B.layer_weights + 2 * LLAMA_70B.lm_head_weights
    assert weights == pytest.approx(70.55e9, rel=1e-3)
    cached = LLAMA_70B.layers * LLAMA_70B.kv_numbers * LLAMA_70B.bytes_each
    assert cached == 327680  # bytes a token


@pytest.mark.parametrize("block", [1, 2, 7])
def test_reading_costs_the_same_for_any_block(block: int) -> None:
    """Weights once a step, four cached numbers a token, layer and request."""
    expected = 3 * (144 + 5 * 6 * 4) + 40
    assert step_seconds(TINY, READS, 5, block, 6) == pytest.approx(expected)


@pytest.mark.parametrize("block", [1, 2, 7])
def test_multiplying_costs_the_same_for_any_token(block: int) -> None:
    tokens = 5 * block
    expected = tokens * (3 * (144 + 2 * 6 * 4) + 40)
    assert step_seconds(TINY, MULTIPLIES, 5, block, 6) == pytest.approx(expected)


def test_a_step_takes_the_longer_of_the_two() -> None:
    both = Machine("both", flops=2.0 * 10, bandwidth=2.0)  # ten products to a number
    assert step_seconds(TINY, both, 1, 10, 0) == pytest.approx(3 * 144 + 40)
    assert step_seconds(TINY, both, 1, 20, 0) == pytest.approx(2 * (3 * 144 + 40))


def test_ranks_divide_the_work_and_add_two_sums_a_layer() -> None:
    alone = step_seconds(TINY, READS, 2, 3, 6)
    assert step_seconds(TINY, READS, 2, 3, 6, ranks=4) == pytest.approx(alone / 4)
    joined = replace(READS, link=8.0, hop=0.5)
    # A ring of 4 sends 2 * 3/4 of 6 tokens' 4 numbers of 2 bytes, 8 bytes a second.
    one = 0.5 + 2 * 3 / 4 * 6 * 4 * 2 / 8
    assert all_reduce_seconds(TINY, joined, 6, 4) == pytest.approx(one)
    assert all_reduce_seconds(TINY, joined, 6, 1) == 0
    assert step_seconds(TINY, joined, 2, 3, 6, ranks=4) == pytest.approx(alone / 4 + 3 * 2 * one)


def test_drafting_reads_the_heads_once_and_scores_for_each() -> None:
    heads = Heads(count=2, joint=6, scored=5)
    assert draft_seconds(TINY, READS, heads, 3) == pytest.approx(6 * 4 * 4 + 5 * 4)
    assert draft_seconds(TINY, MULTIPLIES, heads, 3) == pytest.approx(3 * (6 * 4 * 4 + 2 * 5 * 4))


def test_the_gain_is_tokens_over_seconds() -> None:
    heads = Heads(count=2, joint=6, scored=5)
    plain = 3 * (144 + 6 * 4) + 40
    assert gain(TINY, READS, heads, 3, 2.0, 1, 6) == pytest.approx(2 * plain / (plain + 116))
    # Where products cost all, a block of three is three plain steps.
    slow = 3 * (144 + 2 * 6 * 4) + 40
    drafted = 6 * 4 * 4 + 2 * 5 * 4
    assert gain(TINY, MULTIPLIES, heads, 3, 2.0, 1, 6) == pytest.approx(
        2 * slow / (3 * slow + drafted)
    )


def test_what_does_not_fit_is_no_point_of_the_plan() -> None:
    assert not fits(LLAMA_70B, H100, 1, 128, 1)
    assert fits(LLAMA_70B, H100, 1, 128, 2)
    assert not fits(LLAMA_70B, H100, 64, 2048, 2)
    assert {row["batch"] for row in table() if row["ranks"] == 2} == {1, 2, 4}


def test_the_gain_falls_with_the_batch_and_long_blocks_fall_first() -> None:
    points = {(row["ranks"], row["block"], row["batch"]): row["gain"] for row in table()}
    assert points[8, 9, 1] > points[8, 5, 1] > points[8, 2, 1] > 1.5
    assert points[8, 9, 256] < 1 < points[8, 2, 256]
    for block in (2, 3, 5, 9):
        line = [points[8, block, batch] for batch in (1, 4, 16, 64, 256)]
        assert line == sorted(line, reverse=True)


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    rows = table()
    draw(rows, tmp_path / "a.svg")
    draw(rows, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
