"""Heads and the request's own text drafting together, on every release and model runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import greedy, make_job, make_prompts, run, token_ids
from integration_tests.harness.targets import Target, write_target

VOCAB = 12  # so few that texts repeat themselves
NUM_HEADS, PLACES, MAX_TOKENS = 2, 5, 60
LENGTHS = (1, 2, 17, 33, 40, 64)
PROMPTS = make_prompts(LENGTHS, VOCAB)
# Words that come again, for the lookup to find.
PROMPTS += [prompt[:9] * 3 for prompt in PROMPTS[2:5]]
ENGINE = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 64}

# What the first combination's engine did, for the others to equal: by case.
FIRST: dict[str, Any] = {}

# Further speculative options of each case.
CASES: dict[str, dict[str, Any]] = {
    "whole text": {"min_confidence": 0.0},
    "last 12 tokens": {"min_confidence": 0.0, "context_window": 12},
    "heads alone": {"min_confidence": 0.0, "context_lookup": False},
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few words."""
    return write_target(
        Target("few-words", "Llama", VOCAB, tied=False), tmp_path_factory.mktemp("few-words")
    )


@pytest.fixture(scope="session")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads with a lattice that goes on behind them; they score every other id."""
    folder = tmp_path_factory.mktemp("lattice") / "heads"
    return write_heads(target, folder, NUM_HEADS, places=PLACES, draft_vocab_size=VOCAB // 2)


@pytest.mark.parametrize("case", list(CASES))
def test_ids_and_acceptance(engine: EngineProcess, target: Path, heads: Path, case: str) -> None:
    """The target's own ids; the host's lattice and the device's accept the same drafts."""
    if "ids" not in FIRST:
        reply = run(engine, make_job(target, [greedy(PROMPTS, MAX_TOKENS)], **ENGINE))
        FIRST["ids"] = token_ids(reply["batches"][0])
    config = {"method": "bpd", "model": str(heads), **CASES[case]}
    job = make_job(target, [greedy(PROMPTS, MAX_TOKENS)], speculative_config=config, **ENGINE)
    batch = run(engine, job)["batches"][0]
    assert token_ids(batch) == FIRST["ids"]
    counts = batch["spec"]
    most = NUM_HEADS if case == "heads alone" else PLACES
    assert len(counts["per_position"]) == most
    # V1 leaves out what nothing suggests, and with it whole steps: only what was accepted is
    # the same everywhere.
    accepted = FIRST.setdefault(case, counts["per_position"])
    assert counts["per_position"] == accepted
    if case == "whole text":
        assert accepted[-1] > 0, "the text behind the last head was never right"


def test_dummy_weights_draft_as_many(engine: EngineProcess, target: Path, heads: Path) -> None:
    """`load_format: dummy`, as for a benchmark without weights: the lattice's places are there."""
    dummies = ENGINE | {"load_format": "dummy"}
    config = {"method": "bpd", "model": str(heads), "min_confidence": 0.0}
    job = make_job(target, [greedy(PROMPTS[:2], 8)], speculative_config=config, **dummies)
    batch = run(engine, job)["batches"][0]
    assert len(batch["spec"]["per_position"]) == PLACES
    assert batch["spec"]["drafted"] > 0


def test_the_text_adds_to_the_heads() -> None:
    """Counted by the tests above: the same heads accept more with the text beside them."""
    if not FIRST.keys() >= CASES.keys():
        pytest.skip("the tests that count were not run")
    alone, window, whole = (
        sum(FIRST[case]) for case in ("heads alone", "last 12 tokens", "whole text")
    )
    assert alone < window <= whole
