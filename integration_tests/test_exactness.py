"""Speculating with heads gives the target's own text, on every release and model runner.

Each engine serves several batches: with the random heads themselves, with an oracle in their
place whose drafts are always right, and with a corrupted oracle whose every third draft is wrong.
The last two also check what the heads are given, and every counter against the hand count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import greedy, make_job, make_prompts, record, run, stand_in
from integration_tests.harness.jobs import token_ids as ids_of
from integration_tests.harness.oracle import Recording, Walk, hand_count
from integration_tests.harness.stand_ins import CORRUPT_EVERY

MAX_MODEL_LEN = 160
MAX_TOKENS = 120
NUM_HEADS = 4
# Uneven, around the cache's block sizes; those above 40 end at the context's end. The one-token
# prompt comes first: the scheduler pads such a prompt with empty drafts if others already run.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 40, 41, 47, 48, 60, 64, 65)
PROMPTS = make_prompts(LENGTHS, 128)
ENGINE = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": len(PROMPTS),
    "max_num_batched_tokens": 1024,
}
MODES = ("heads", *CORRUPT_EVERY)
# Target, further fields of the heads' config, and how many of the heads draft.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 4),
    "qwen2": ("qwen2", {"conditioning": "none", "activation": "relu"}, 3),
    "tied": ("llama-tied", {"draft_vocab_size": 50}, 4),
}


@pytest.fixture(scope="session")
def heads(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random heads for each case: name to checkpoint directory."""
    root = tmp_path_factory.mktemp("heads")
    return {
        name: write_heads(targets[target], root / name, NUM_HEADS, **fields)
        for name, (target, fields, _) in CASES.items()
    }


def recorded(engine: EngineProcess, target: Path) -> list[Recording]:
    """What the target alone answers, a few tokens past what the tests ask for."""
    batches = [greedy(PROMPTS, MAX_TOKENS + NUM_HEADS + 1)]
    return record(PROMPTS, run(engine, make_job(target, batches, **ENGINE))["batches"][0])


RECORDED: dict[tuple[str, str], list[Recording]] = {}


@pytest.fixture
def llama(engine: EngineProcess, targets: dict[str, Path]) -> list[Recording]:
    """The recordings of the `llama` target on this engine, made once."""
    key = (engine.combo.name, "llama")
    if key not in RECORDED:
        RECORDED[key] = recorded(engine, targets["llama"])
    return RECORDED[key]


def speculating(heads: Path, num_drafts: int, **more: Any) -> dict[str, Any]:
    """The engine's `speculative_config` for heads."""
    return {"method": "bpd", "model": str(heads), "num_speculative_tokens": num_drafts, **more}


def check_ids(batch: dict[str, Any], recordings: list[Recording], max_tokens: int) -> None:
    """The batch gave what the target alone gives."""
    assert ids_of(batch) == [recording.answer[:max_tokens] for recording in recordings]
    assert batch["faults"] == []


def check_batches(
    reply: dict[str, Any], recordings: list[Recording], num_drafts: int, max_tokens: int
) -> None:
    """Ids and counters of one batch for each of `MODES`."""
    for mode, batch in zip(MODES, reply["batches"], strict=True):
        check_ids(batch, recordings, max_tokens)
        spec = batch["spec"]
        if mode == "heads":
            assert 0 <= spec["accepted"] < spec["drafted"] <= num_drafts * spec["drafts"]
            continue
        walk = Walk(
            num_drafts,
            max_tokens,
            MAX_MODEL_LEN,
            CORRUPT_EVERY[mode],
            reply["async_scheduling"],
        )
        assert spec == hand_count(recordings, walk).as_reported(), mode


def test_ids_and_counters(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """Sixteen uneven prompts to the context's end: every mode, everything counted."""
    batches = [greedy(PROMPTS, MAX_TOKENS, mode) for mode in MODES]
    config = speculating(heads["llama"], NUM_HEADS)
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    reply = run(engine, job | {"drafts": stand_in("plugin", llama)})
    check_batches(reply, llama, NUM_HEADS, MAX_TOKENS)
    assert reply["async_scheduling"] == (engine.combo.runner == "V2")


def test_chunked_prefill(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """Prompts that arrive in pieces beside requests that decode, and more requests than slots."""
    few = 30
    engine_arguments = ENGINE | {"max_num_seqs": 6, "max_num_batched_tokens": 40}
    batches = [greedy(PROMPTS, few, mode) for mode in MODES]
    config = speculating(heads["llama"], NUM_HEADS)
    job = make_job(targets["llama"], batches, speculative_config=config, **engine_arguments)
    reply = run(engine, job | {"drafts": stand_in("plugin", llama)})
    check_batches(reply, llama, NUM_HEADS, few)


def test_dynamic_schedule(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """The number of drafts follows the batch size; small batches can be counted by hand."""
    few, small, scheduled = 30, 6, 2
    config = speculating(
        heads["llama"],
        NUM_HEADS,
        num_speculative_tokens_per_batch_size=[[1, small, scheduled], [small + 1, 16, 3]],
    )
    batches = [greedy(PROMPTS, few, mode) for mode in MODES]
    batches += [greedy(PROMPTS[:small], few, "corrupted")]
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    reply = run(engine, job | {"drafts": stand_in("plugin", llama)})
    for batch in reply["batches"][:-1]:
        check_ids(batch, llama, few)
        spec = batch["spec"]
        assert scheduled * spec["drafts"] < spec["drafted"] <= 3 * spec["drafts"]
    last = reply["batches"][-1]
    check_ids(last, llama[:small], few)
    walk = Walk(
        NUM_HEADS,
        few,
        MAX_MODEL_LEN,
        CORRUPT_EVERY["corrupted"],
        reply["async_scheduling"],
        scheduled,
    )
    assert last["spec"] == hand_count(llama[:small], walk).as_reported()


@pytest.mark.parametrize("case", ["qwen2", "tied"])
def test_other_targets(
    engine: EngineProcess, targets: dict[str, Path], heads: dict[str, Path], case: str
) -> None:
    """Tied heads, other architectures, no conditioning, fewer drafts than heads, few scored ids."""
    target, _, num_drafts = CASES[case]
    few = 30
    recordings = recorded(engine, targets[target])
    batches = [greedy(PROMPTS, few)]
    config = speculating(heads[case], num_drafts)
    job = make_job(targets[target], batches, speculative_config=config, **ENGINE)
    batch = run(engine, job)["batches"][0]
    check_ids(batch, recordings, few)
    assert batch["spec"]["drafts"] > 0
    assert batch["spec"]["accepted"] < batch["spec"]["drafted"]
