"""The cost formulae, by hand on small shapes, and against what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import training_cost
from benchmarks.roofline import H100, LLAMA_70B, Model, step_seconds
from benchmarks.training_cost import (
    BATCH,
    CONTEXT,
    LARGE_RECIPE,
    RANKS,
    SMALL_BATCH,
    SMALL_STEP,
    WORKERS,
    Recipe,
    estimate,
    gpus_holding,
    hours,
    label_bytes,
    lines,
    measured,
    random_reads,
    soft_label_flops,
    state_bytes,
    target_flops,
    training_flops,
)
from heads_training.dataset import label_text
from heads_training.losses import SOFT_LABELS

ROOT = Path(__file__).parents[2]
TINY = Model("tiny", 3, 4, 2, 1, 2, 8, 10)  # 144 numbers a layer
RECIPE = Recipe(2, 3, 5, 100, 1.0, 2.0, head_decay=0.5)


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_a_training_token_by_hand() -> None:
    """Six units read state and embedding; the second head sees half of the rows."""
    heads = 8 * 6 + 1.5 * 6 * 4
    assert training_flops(TINY, RECIPE) == pytest.approx(6 * heads + 4 * 1.5 * 4 * 5)


def test_states_and_forwards_by_hand() -> None:
    assert state_bytes(TINY, RECIPE) == 100 * 4 * 2
    assert target_flops(TINY, 7) == 2 * 7 * 3 * 144
    assert soft_label_flops(TINY, RECIPE) == 2 * 100 * 4 * 5
    assert hours(7.2e15, 1e12) == 2


def test_what_is_held_and_read_by_hand() -> None:
    """Labels: two ids, two heads' ids twice, 16 soft ones; a prompt's and an answer's id."""
    assert label_bytes(RECIPE) == 100 * (8 + 8 + 16 + 16 + 16 * (4 + 2) + 4 + 4)
    assert random_reads(RECIPE) == pytest.approx(2 * 0.95 * 100)
    assert gpus_holding(LLAMA_70B, H100) == 3  # 141 GB, 64 of 80 each
    own_T, next_TK = label_text(torch.arange(3), torch.arange(3), 2)
    assert own_T.element_size() == next_TK.element_size() == 8
    assert SOFT_LABELS == 16


def test_measured_shares_come_from_the_files() -> None:
    """Operations a token written out: heads and scored ids; 30 layers of 3,538,944 numbers."""
    alone, whole = result("training_step.json"), result("name-to-heads.json")
    core = 1e9 * alone["bfloat16"]["machine_gflops"]
    seen = 1 + 0.7 + 0.49 + 0.343
    training = 6 * (2 * 576 * 2240 + seen * 2240 * 576) + 4 * seen * 576 * 8192
    found = measured()
    speed = alone["bfloat16"]["training_tokens_per_s"]
    assert alone["threads"] == 1
    assert found["training, steps alone"] == pytest.approx((speed, speed * training / core))
    last = whole["training"][-1]
    speed = last["step"] * 1024 / last["seconds"]
    assert found["training, whole run"] == pytest.approx((speed, speed * training / (2 * core)))
    speed = whole["hidden_states"]["tokens_per_second"]
    assert found["states"] == pytest.approx((speed, speed * 2 * 30 * 3_538_944 / (2 * core)))


def test_measured_generation_comes_from_the_files() -> None:
    """Answers over the seconds behind the engine's start; a step of 128 requests is multiplying."""
    whole, found = result("name-to-heads.json"), measured()
    made = whole["generation"]
    seconds = made["seconds_from_start_to_answers"] - made["seconds_of_them_to_start_the_engine"]
    prompts = whole["hidden_states"]["tokens"] - made["answer_tokens"]
    context = round((prompts + made["answer_tokens"] / 2) / whole["answers"]["answers"])
    core = 1e9 * result("training_step.json")["bfloat16"]["machine_gflops"]
    memory = 2e9 * result("roofline-anchor.json")["gigabytes_per_s"]
    # Of a token: its products in layers and LM head, and its cache read, 2 x 3 x 64 a layer.
    each = 2 * (30 * 3_538_944 + 576 * 49152) / (2 * core) + 30 * context * 384 * 2 / memory
    speed, share = found["generation, answers alone"]
    assert speed == pytest.approx(made["answer_tokens"] / seconds)
    assert share == pytest.approx(speed * each)
    both, with_prompts = found["generation"]
    assert both == pytest.approx(whole["hidden_states"]["tokens"] / seconds)
    read = prompts * 2 * 30 * 3_538_944 / (2 * core) / seconds
    assert with_prompts == pytest.approx(both * each + read)


def test_the_small_recipe_is_the_one_that_was_run() -> None:
    recipe = (ROOT / "heads_training" / "recipes" / "smollm2-135m-cpu.yaml").read_text()
    assert "smollm2-135m-cpu" in result("name-to-heads.json")["command"]
    assert f"batch_size: {SMALL_STEP}" in recipe
    assert f"max_num_seqs: {SMALL_BATCH} " in recipe
    assert result("training_step.json")["shapes"]["rows"] == SMALL_STEP


def test_no_share_is_assumed_that_was_not_reached() -> None:
    """Measured again and lower, the assumptions have to follow; and none exceeds the machine."""
    shares = {name: share for name, (_, share) in measured().items()}
    assert all(0 < share < 1 for share in shares.values())
    training = [share for name, share in shares.items() if name.startswith("training")]
    assert len(training) == 2
    assert min(training) >= training_cost.TRAINING_SHARE
    assert shares["states"] >= training_cost.FORWARD_SHARE
    assert shares["generation"] >= training_cost.GENERATION_SHARE


def test_every_stage_grows_with_the_tokens() -> None:
    one = estimate(LLAMA_70B, LARGE_RECIPE)
    two = estimate(LLAMA_70B, replace(LARGE_RECIPE, answer_tokens=2e8))
    assert {name: two[name] / value for name, value in one.items()} == pytest.approx(
        dict.fromkeys(one, 2.0)
    )
    assert one["states, bytes"] == 100e6 * 8192 * 2
    assert one["read in order, bytes"] == (WORKERS + 1) * 100e6 * 8192 * 2
    step = step_seconds(LLAMA_70B, H100, BATCH, 1, CONTEXT, RANKS)
    assert one["answers, GPU-hours"] == pytest.approx(8 * 100e6 * step / 256 / 0.2 / 3600)


def test_prompts_cost_what_answers_do_unless_they_are_given() -> None:
    own = estimate(LLAMA_70B, LARGE_RECIPE)
    given = estimate(LLAMA_70B, replace(LARGE_RECIPE, written_share=0.0))
    assert own["prompts written, GPU-hours"] == pytest.approx(own["answers, GPU-hours"])
    assert given["prompts written, GPU-hours"] == 0
    assert given["prompts read, GPU-hours"] == own["prompts read, GPU-hours"] > 0


def test_the_docs_quote_what_is_printed() -> None:
    assert "\n".join(lines()) in (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
