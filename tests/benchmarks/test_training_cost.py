"""The cost formulae, by hand on small shapes, and against what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.roofline import H100, LLAMA_70B, Model, step_seconds
from benchmarks.training_cost import (
    BATCH,
    CONTEXT,
    LARGE_RECIPE,
    RANKS,
    Recipe,
    estimate,
    hours,
    measured,
    state_bytes,
    target_flops,
    training_flops,
)

TINY = Model("tiny", 3, 4, 2, 1, 2, 8, 10)  # 144 numbers a layer
RECIPE = Recipe(2, 3, 5, 100, 1.0, 2.0, head_decay=0.5)


def test_a_training_token_by_hand() -> None:
    """Six units read state and embedding; the second head sees half of the rows."""
    heads = 8 * 6 + 1.5 * 6 * 4
    assert training_flops(TINY, RECIPE) == pytest.approx(6 * heads + 4 * 1.5 * 4 * 5)


def test_states_and_forwards_by_hand() -> None:
    assert state_bytes(TINY, RECIPE) == 100 * 4 * 2
    assert target_flops(TINY, 7) == 2 * 7 * 3 * 144
    assert hours(7.2e15, 1e12) == 2


def test_measured_speeds_are_a_share_of_what_the_machine_can() -> None:
    """A formula that counted twice, or half, would leave this range."""
    shares = measured()
    assert 0.3 < shares["training"] < 0.8
    assert 0.2 < shares["states"] < 0.6


def test_every_stage_grows_with_the_tokens() -> None:
    one = estimate(LLAMA_70B, LARGE_RECIPE)
    two = estimate(LLAMA_70B, replace(LARGE_RECIPE, answer_tokens=2e8))
    assert {name: two[name] / value for name, value in one.items()} == pytest.approx(
        dict.fromkeys(one, 2.0)
    )
    assert one["state_bytes"] == 100e6 * 8192 * 2
    step = step_seconds(LLAMA_70B, H100, BATCH, 1, CONTEXT, RANKS)
    assert one["generation_hours"] == pytest.approx(8 * 100e6 * step / 256 / 0.5 / 3600)
