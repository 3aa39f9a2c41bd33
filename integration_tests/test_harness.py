"""The harness itself, proved on the engines with no plugin: same ids, and the hand count right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.jobs import (
    greedy,
    make_job,
    make_prompts,
    record,
    run,
    stand_in,
    token_ids,
)
from integration_tests.harness.oracle import (
    Recording,
    Walk,
    continuation,
    count_blocks,
    hand_count,
)
from integration_tests.harness.stand_ins import CORRUPT_EVERY, NO_STOCK_V2, STOCK_V1, STOCK_V2

MAX_MODEL_LEN = 96
MAX_TOKENS = 30
NUM_DRAFTS = 4
# The last three end at the context's end: one by far, one exactly at the limit, one token before.
LENGTHS = (1, 2, 5, 16, 31, 90, 66, 65)
PROMPTS = make_prompts(LENGTHS, 128)
ENGINE = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 512}

# The ids that the first combination gave for each target: the others must give the same.
FIRST: dict[str, list[list[int]]] = {}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_all_combinations_agree(engine: EngineProcess, targets: dict[str, Path], name: str) -> None:
    """Greedy ids without speculation are the same on every combination."""
    reply = run(engine, make_job(targets[name], [greedy(PROMPTS, MAX_TOKENS)], **ENGINE))
    ids = token_ids(reply["batches"][0])
    assert FIRST.setdefault(name, ids) == ids
    assert [len(one) for one in ids] == [min(MAX_TOKENS, MAX_MODEL_LEN - n) for n in LENGTHS]
    assert reply["batches"][0]["spec"]["drafts"] == 0


def test_failures_are_reported(engine: EngineProcess, tmp_path: Path) -> None:
    """An engine that cannot be built gives its error, and the process goes on serving."""
    reply = engine.run(make_job(tmp_path / "missing", [greedy(PROMPTS, 1)]))
    assert not reply["ok"]
    assert "missing" in reply["trace"]


@pytest.mark.row("metrics")
def test_counters_by_hand(engine: EngineProcess, targets: dict[str, Path]) -> None:
    """The hand count equals the engine's counters for drafting through its own outside doors.

    On V1 the engine's own ngram method is run as well: it keeps the ids and is counted. V1 drafts
    zeros for a whole batch once one request is within a block of the drafter's context, so the
    requests of this test all end before that (the plugin's drafter has no such limit, and
    `test_exactness.py` goes to the context's end).
    """
    if (engine.combo.release, engine.combo.runner) == (NO_STOCK_V2, "V2"):
        pytest.skip("vLLM's own drafters, whose doors are used here, are not on its V2")
    roomy = ENGINE | {"max_model_len": max(LENGTHS) + MAX_TOKENS + 2 * (NUM_DRAFTS + 1)}
    plain = make_job(targets["llama"], [greedy(PROMPTS, MAX_TOKENS + NUM_DRAFTS + 1)], **roomy)
    recordings = record(PROMPTS, run(engine, plain)["batches"][0])
    expected_ids = [recording.answer[:MAX_TOKENS] for recording in recordings]
    method: dict[str, Any] = dict(STOCK_V1 if engine.combo.runner == "V1" else STOCK_V2)
    method["num_speculative_tokens"] = NUM_DRAFTS
    batches = [greedy(PROMPTS, MAX_TOKENS, mode) for mode in CORRUPT_EVERY]
    job = make_job(targets["llama"], batches, speculative_config=method, **roomy)
    reply = run(engine, job | {"drafts": stand_in("stock", recordings)})
    for mode, batch in zip(CORRUPT_EVERY, reply["batches"], strict=True):
        assert token_ids(batch) == expected_ids
        walk = Walk(NUM_DRAFTS, MAX_TOKENS, roomy["max_model_len"], CORRUPT_EVERY[mode])
        walk = replace(walk, async_scheduling=reply["async_scheduling"])
        assert batch["spec"] == hand_count(recordings, walk).as_reported(), mode
    if engine.combo.runner == "V1":
        lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        lookup |= {"num_speculative_tokens": NUM_DRAFTS}
        batches = [greedy(PROMPTS, MAX_TOKENS)]
        job = make_job(targets["llama"], batches, speculative_config=lookup, **roomy)
        batch = run(engine, job)["batches"][0]
        assert token_ids(batch) == expected_ids
        assert batch["spec"]["drafted"] >= batch["spec"]["drafts"] > 0


def test_continuation() -> None:
    """The recorded drafts follow the whole prefix, and are wrong only where corrupted."""
    recordings = [Recording([1, 2], [3, 4, 5, 6]), Recording([1], [3, 9, 9])]
    assert continuation([1, 2, 3], recordings, 2) == [4, 5]
    assert continuation([1, 3], recordings, 3) == [9, 9, 0]
    assert continuation([1, 2, 3], recordings, 3, corrupt_every=3) == [4, 0, 6]
    assert continuation([1, 4], recordings, 2) == [0, 0]


def test_hand_count_of_one_request() -> None:
    """A walk worked out on paper: 10 tokens, 3 drafts, every third draft wrong."""
    recording = Recording([7] * 5, list(range(1, 20)))
    counts = hand_count([recording], Walk(3, max_tokens=10, max_model_len=100, corrupt_every=3))
    # Answer places 2, 5 and 8 are drafted wrong. Known after each step: 1, 3, 6, 9, 12.
    assert (counts.drafts, counts.drafted, counts.accepted) == (4, 12, 1 + 2 + 2 + 2)
    assert counts.per_position == [4, 3, 0]
    # Room for 13 tokens in all: 5 + 1 known, then drafts of 3 and 2.
    counts = hand_count([recording], Walk(3, max_tokens=10, max_model_len=13))
    assert (counts.drafts, counts.drafted, counts.accepted) == (2, 5, 5)


def test_a_count_of_drafted_blocks() -> None:
    """Two right of three, none right, cut at the limit, none of a prompt or of a finished one."""
    recordings = [Recording([7, 7], [1, 2, 3, 4, 5, 6])]
    blocks = [
        ([7], [7, 1, 2]),
        ([7, 7, 1], [2, 3, 9]),
        ([7, 7, 1, 2, 3, 4], [9, 6, 5]),  # room for one
        ([7, 7, 1, 2, 3, 4, 5], [6, 6, 6]),
        ([8], [1, 1, 1]),
    ]
    counts = count_blocks(blocks, recordings, Walk(3, max_tokens=5, max_model_len=8))
    assert (counts.drafts, counts.drafted, counts.accepted) == (2, 4, 2)
    assert counts.per_position == [1, 1, 0]
