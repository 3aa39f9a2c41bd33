"""Speculating with heads gives the target's own text, on every release and model runner.

Each engine serves several batches: with the random heads themselves, with an oracle in their
place whose drafts are always right, and with a corrupted oracle whose every third draft is wrong.
The last two also check what the heads are given, and every counter against the hand count.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import greedy, make_job, make_prompts, record, run, stand_in
from integration_tests.harness.jobs import token_ids as ids_of
from integration_tests.harness.oracle import Recording, Walk, count_blocks, hand_count
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
# Its V2 drafts the same number whatever a dynamic schedule says: bpd refuses a schedule there.
NO_SCHEDULE_ON_V2 = "0.29"
# Asynchronous steps are tried on the recorded text from here on, to the same end.
RESUME_AT = 100
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


# What each target alone answers, a few tokens past what the tests ask for. The first engine that
# needs it records it, for all: that they agree is `test_harness.py`'s first test.
RECORDED: dict[str, list[Recording]] = {}


def recorded(engine: EngineProcess, targets: dict[str, Path], name: str) -> list[Recording]:
    """The recordings of the target `name`."""
    if name not in RECORDED:
        batches = [greedy(PROMPTS, MAX_TOKENS + NUM_HEADS + 1)]
        reply = run(engine, make_job(targets[name], batches, **ENGINE))
        RECORDED[name] = record(PROMPTS, reply["batches"][0])
    return RECORDED[name]


@pytest.fixture
def llama(engine: EngineProcess, targets: dict[str, Path]) -> list[Recording]:
    """The recordings of the `llama` target."""
    return recorded(engine, targets, "llama")


def resumed(recordings: list[Recording], done: int) -> list[Recording]:
    """The same texts with `done` tokens of each answer moved to its prompt; ended ones left out."""
    return [
        Recording(recording.prompt + recording.answer[:done], recording.answer[done:])
        for recording in recordings
        if len(recording.answer) > done
    ]


def speculating(heads: Path, num_drafts: int, **more: Any) -> dict[str, Any]:
    """The engine's `speculative_config` for heads."""
    return {"method": "bpd", "model": str(heads), "num_speculative_tokens": num_drafts, **more}


def check_ids(batch: dict[str, Any], recordings: list[Recording], max_tokens: int) -> None:
    """The batch gave what the target alone gives."""
    assert ids_of(batch) == [recording.answer[:max_tokens] for recording in recordings]
    assert batch["faults"] == []


def check_random(batch: dict[str, Any], num_drafts: int) -> None:
    """Random heads draft something, and some of it is rejected."""
    spec = batch["spec"]
    assert 0 < spec["drafts"] <= spec["drafted"] <= num_drafts * spec["drafts"]
    assert 0 <= spec["accepted"] < spec["drafted"]


def check_scripted(reply: dict[str, Any], recordings: list[Recording], walk: Walk) -> None:
    """Ids and every counter of the last batches of a reply, one for each way to corrupt."""
    walk = replace(walk, async_scheduling=reply["async_scheduling"])
    for mode, batch in zip(CORRUPT_EVERY, reply["batches"][-len(CORRUPT_EVERY) :], strict=True):
        check_ids(batch, recordings, walk.max_tokens)
        expected = hand_count(recordings, replace(walk, corrupt_every=CORRUPT_EVERY[mode]))
        assert batch["spec"] == expected.as_reported(), mode


@pytest.mark.row("lengths", "metrics")
def test_ids_and_counters(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """Sixteen uneven prompts to the context's end: every mode, everything counted."""
    batches = [greedy(PROMPTS, MAX_TOKENS, mode) | {"blocks": True} for mode in MODES]
    config = speculating(heads["llama"], NUM_HEADS)
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    reply = run(engine, job | {"drafts": stand_in("plugin", llama)})
    random = reply["batches"][0]
    check_ids(random, llama, MAX_TOKENS)
    check_random(random, NUM_HEADS)
    walk = Walk(NUM_HEADS, MAX_TOKENS, MAX_MODEL_LEN)
    assert random["spec"] == count_blocks(random["blocks"], llama, walk).as_reported()
    check_scripted(reply, llama, walk)


@pytest.mark.row("batching")
def test_chunked_prefill(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """Prompts that arrive in pieces beside requests that decode, and more requests than slots."""
    few = 16
    engine_arguments = ENGINE | {"max_num_seqs": 8, "max_num_batched_tokens": 48}
    batches = [greedy(PROMPTS, few // 2)]
    batches += [greedy(PROMPTS, few, mode) for mode in CORRUPT_EVERY]
    config = speculating(heads["llama"], NUM_HEADS)
    job = make_job(targets["llama"], batches, speculative_config=config, **engine_arguments)
    reply = run(engine, job | {"drafts": stand_in("plugin", llama)})
    check_ids(reply["batches"][0], llama, few // 2)
    check_random(reply["batches"][0], NUM_HEADS)
    check_scripted(reply, llama, Walk(NUM_HEADS, few, MAX_MODEL_LEN))


@pytest.mark.row("drafts fewer than heads")
def test_dynamic_schedule(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """The number of drafts follows the batch size; small batches can be counted by hand."""
    few, small, scheduled = 20, 6, 2
    config = speculating(
        heads["llama"],
        NUM_HEADS,
        num_speculative_tokens_per_batch_size=[[1, small, scheduled], [small + 1, 16, 3]],
    )
    # Requests of a large batch end one after another, so that it becomes a small one.
    batches = [greedy(PROMPTS, few, "corrupted")]
    batches[0]["sampling"] = [
        batches[0]["sampling"] | {"max_tokens": few if row < small else few // 2}
        for row in range(len(PROMPTS))
    ]
    batches += [greedy(PROMPTS[:small], few, mode) for mode in CORRUPT_EVERY]
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    if engine.combo.runner == "V2" and engine.combo.release == NO_SCHEDULE_ON_V2:
        assert engine.run(job)["error"].startswith("num_speculative_tokens_per_batch_size: found [")
        return
    reply = run(engine, job | {"drafts": stand_in("plugin", llama)})
    large = reply["batches"][0]
    assert ids_of(large) == [
        recording.answer[: few if row < small else few // 2] for row, recording in enumerate(llama)
    ]
    assert large["faults"] == []
    spec = large["spec"]
    assert scheduled * spec["drafts"] < spec["drafted"] < 3 * spec["drafts"]
    walk = Walk(NUM_HEADS, few, MAX_MODEL_LEN, scheduled=scheduled)
    check_scripted(reply, llama[:small], walk)


@pytest.mark.row("runners")
def test_async_scheduling(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """Steps planned before the last one's drafts are verified, to the context's end (V2)."""
    if engine.combo.runner != "V2":
        pytest.skip("bpd drafts after V1's bookkeeping, which asynchronous scheduling goes without")
    ends = resumed(llama, RESUME_AT)
    few = MAX_TOKENS - RESUME_AT
    batches = [greedy([end.prompt for end in ends], few, mode) for mode in CORRUPT_EVERY]
    config = speculating(heads["llama"], NUM_HEADS)
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    job |= {"drafts": stand_in("plugin", ends), "async_scheduling": True}
    reply = run(engine, job)
    assert reply["async_scheduling"]
    check_scripted(reply, ends, Walk(NUM_HEADS, few, MAX_MODEL_LEN))


@pytest.mark.row("targets")
@pytest.mark.parametrize("case", ["qwen2", "tied"])
def test_other_targets(
    engine: EngineProcess, targets: dict[str, Path], heads: dict[str, Path], case: str
) -> None:
    """Tied heads, other architectures, no conditioning, fewer drafts than heads, few scored ids."""
    target, _, num_drafts = CASES[case]
    few = 8
    recordings = recorded(engine, targets, target)
    batches = [greedy(PROMPTS, few)]
    config = speculating(heads[case], num_drafts)
    job = make_job(targets[target], batches, speculative_config=config, **ENGINE)
    batch = run(engine, job)["batches"][0]
    check_ids(batch, recordings, few)
    check_random(batch, num_drafts)


@pytest.mark.full
@pytest.mark.row("drafts fewer than heads")
@pytest.mark.parametrize("num_drafts", range(1, NUM_HEADS))
def test_fewer_drafts_than_heads(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
    num_drafts: int,
) -> None:
    """One to k - 2 of the k - 1 heads draft: every mode, everything counted."""
    few, some = 14, llama[:6]
    prompts = [recording.prompt for recording in some]
    batches = [greedy(prompts, few, mode) for mode in MODES]
    config = speculating(heads["llama"], num_drafts)
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    reply = run(engine, job | {"drafts": stand_in("plugin", some)})
    check_ids(reply["batches"][0], some, few)
    check_random(reply["batches"][0], num_drafts)
    check_scripted(reply, some, Walk(num_drafts, few, MAX_MODEL_LEN))


@pytest.mark.full
@pytest.mark.row("runners")
def test_async_scheduling_changes_nothing(
    engine: EngineProcess,
    targets: dict[str, Path],
    heads: dict[str, Path],
    llama: list[Recording],
) -> None:
    """Away from the context's end, on and off give the same ids and the same counters (V2)."""
    if engine.combo.runner != "V2":
        pytest.skip("bpd drafts after V1's bookkeeping, which asynchronous scheduling goes without")
    few, some = 14, llama[:6]
    batches = [greedy([one.prompt for one in some], few, mode) for mode in MODES]
    config = speculating(heads["llama"], NUM_HEADS)
    job = make_job(targets["llama"], batches, speculative_config=config, **ENGINE)
    job |= {"drafts": stand_in("plugin", some)}
    on, off = (run(engine, job | {"async_scheduling": choice}) for choice in (True, False))
    assert (on["async_scheduling"], off["async_scheduling"]) == (True, False)
    for left, right in zip(on["batches"], off["batches"], strict=True):
        assert ids_of(left) == ids_of(right) == [one.answer[:few] for one in some]
        assert left["spec"] == right["spec"]
