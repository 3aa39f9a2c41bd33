"""Heads and the request's own text drafting together, on every release and model runner."""

from __future__ import annotations

from itertools import pairwise
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


def ids_alone(engine: EngineProcess, target: Path) -> Any:
    """What the target alone answers, recorded by the first engine that needs it."""
    if "ids" not in FIRST:
        reply = run(engine, make_job(target, [greedy(PROMPTS, MAX_TOKENS)], **ENGINE))
        FIRST["ids"] = token_ids(reply["batches"][0])
    return FIRST["ids"]


@pytest.mark.parametrize("case", list(CASES))
def test_ids_and_acceptance(engine: EngineProcess, target: Path, heads: Path, case: str) -> None:
    """The target's own ids; the host's lattice and the device's accept the same drafts."""
    alone = ids_alone(engine, target)
    config = {"method": "bpd", "model": str(heads), **CASES[case]}
    job = make_job(target, [greedy(PROMPTS, MAX_TOKENS)], speculative_config=config, **ENGINE)
    batch = run(engine, job)["batches"][0]
    assert token_ids(batch) == alone
    counts = batch["spec"]
    most = NUM_HEADS if case == "heads alone" else PLACES
    assert len(counts["per_position"]) == most
    # V1 leaves out what nothing suggests, and with it whole steps: only what was accepted is
    # the same everywhere.
    accepted = FIRST.setdefault(case, counts["per_position"])
    assert counts["per_position"] == accepted
    if case == "whole text":
        assert accepted[-1] > 0, "the text behind the last head was never right"


@pytest.mark.full
@pytest.mark.row("drafts fewer than heads")
@pytest.mark.parametrize("mode", ["lattice"])
def test_a_dynamic_schedule(engine: EngineProcess, target: Path, heads: Path, mode: str) -> None:
    """Fewer drafts while many run, none while most do, and some again when those have ended.

    Each block is still what the request's own text gives.
    """
    if (engine.combo.release, engine.combo.runner) == ("0.29", "V2"):
        pytest.skip("its V2 takes no schedule: refused, as test_exactness.py shows")
    few, many = 3, 7
    lengths = [30 if row < few else 12 for row in range(len(PROMPTS))]
    batch = greedy(PROMPTS, 0, mode)
    batch["sampling"] = [batch["sampling"] | {"max_tokens": length} for length in lengths]
    schedule = [[1, few, PLACES], [few + 1, many - 1, 2], [many, ENGINE["max_num_seqs"], 0]]
    config = {
        "method": "bpd",
        "model": str(heads),
        "min_confidence": 0.0,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    job = make_job(target, [batch], speculative_config=config, **ENGINE)
    found = run(engine, job)["batches"][0]
    alone = ids_alone(engine, target)
    assert token_ids(found) == [ids[:n] for ids, n in zip(alone, lengths, strict=True)]
    assert found["faults"] == []
    assert found["lattice"]["moved"] > 0
    assert 2 * found["spec"]["drafts"] < found["spec"]["drafted"] < PLACES * found["spec"]["drafts"]
    check_crossing(found["lattice"]["steps"], many)


def check_crossing(steps: list[list[int]], many: int) -> None:
    """Drafts are verified before `many` requests run, none while they do, some again afterwards.

    What a step verifies was drafted in the step before, by how many ran then.
    """
    drafts = [(before, verified) for (before, _), (_, verified) in pairwise(steps)]
    resting = [number for number, (before, _) in enumerate(drafts) if before >= many]
    assert resting, steps
    assert not any(drafts[number][1] for number in resting), steps
    assert any(verified for _, verified in drafts[: resting[0]]), steps
    assert any(verified for _, verified in drafts[resting[-1] + 1 :]), steps


@pytest.mark.full
@pytest.mark.row("runners")
@pytest.mark.parametrize("mode", ["lattice"])
def test_asynchronous_steps(engine: EngineProcess, target: Path, heads: Path, mode: str) -> None:
    """On and off: the same ids, counters and blocks (V2)."""
    if engine.combo.runner != "V2":
        pytest.skip("bpd drafts after V1's bookkeeping, which asynchronous scheduling goes without")
    config = {"method": "bpd", "model": str(heads)}
    job = make_job(target, [greedy(PROMPTS, 30, mode)], speculative_config=config, **ENGINE)
    on, off = (run(engine, job | {"async_scheduling": choice}) for choice in (True, False))
    assert (on["async_scheduling"], off["async_scheduling"]) == (True, False)
    for found in (on["batches"][0], off["batches"][0]):
        assert token_ids(found) == [ids[:30] for ids in ids_alone(engine, target)]
        assert found["faults"] == []
        assert found["lattice"]["moved"] > 0
    assert on["batches"][0]["spec"] == off["batches"][0]["spec"]


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
