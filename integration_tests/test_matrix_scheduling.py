"""Rows batching, preemption, abort and LoRA: every way to draft."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.adapters import write_adapter
from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.jobs import make_job, make_prompts, run, stand_in
from integration_tests.harness.known import KnownFaultError, known_fault
from integration_tests.harness.matrix import (
    LATTICE,
    MODES,
    NUM_HEADS,
    PLACES,
    SCRIPTED,
    Group,
    Request,
    Suite,
    check_group,
)
from integration_tests.harness.stand_ins import NO_STOCK_V2, STOCK_V2

VOCAB = 256
BLOCK_SIZE = 32  # the CPU's attention takes multiples of it
ENGINE: dict[str, Any] = {
    "max_model_len": 112,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": BLOCK_SIZE,
}
# Seconds of streams dropped half-way, how many rounds those are at least, and the bytes a process
# may grow by over the second half.
LASTING = 120
ROUNDS = 60
GROWTH = 16 << 20


Row = tuple[dict[str, Any], dict[str, Group]]


def requests(prompts: list[list[int]], max_tokens: int, **more: Any) -> list[Request]:
    """Greedy requests to their length limit."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return [Request(str(i), prompt, sampling, **more) for i, prompt in enumerate(prompts)]


def batching(target: Path, folder: Path) -> Row:
    """Tiny steps, more requests than slots, and prompts whose beginning is cached."""
    shared = make_prompts([2 * BLOCK_SIZE], VOCAB, seed=11)[0]
    # A prompt with one token left to read is padded with empty drafts by the scheduler: none here.
    ends = make_prompts([2, 5, BLOCK_SIZE, 20, 30], VOCAB, seed=12)
    prompts = [shared + end for end in ends] + make_prompts([2, 3, 31, 47, 60], VOCAB, seed=13)
    engine = {"enable_prefix_caching": True, "max_num_seqs": 4, "max_num_batched_tokens": 36}
    return engine, {"batching": Group(requests(prompts, 14), repeat=2, extend=True)}


def preemption(target: Path, folder: Path) -> Row:
    """A cache that holds half of what eight requests come to need."""
    prompts = make_prompts([9, 10, 11, 12, 13, 14, 15, 16], VOCAB, seed=21)
    engine = {"num_gpu_blocks_override": 13, "max_model_len": 80}
    return engine, {"preemption": Group(requests(prompts, 48), extend=True)}


def abort(target: Path, folder: Path) -> Row:
    """Thirty-two streams; every second one is dropped after 1 to 16 tokens."""
    prompts = make_prompts([4 + n % 9 for n in range(32)], VOCAB, seed=31)
    made = requests(prompts, 24)
    for row in range(0, len(made), 2):
        dropped = made[row]
        made[row] = Request(dropped.name, dropped.prompt, dropped.sampling, None, 1 + row // 2)
    return {"max_num_seqs": 32}, {"abort": Group(made, extend=True)}


def lora(target: Path, folder: Path) -> Row:
    """The base and two adapters in one batch."""
    adapters: list[dict[str, Any] | None] = [None]
    for number in (1, 2):
        path = write_adapter(target, folder / f"adapter{number}", seed=number)
        adapters.append({"name": f"adapter{number}", "id": number, "path": str(path)})
    prompts = make_prompts([4 + n for n in range(9)], VOCAB, seed=41)
    made = [
        request
        for row, prompt in enumerate(prompts)
        for request in requests([prompt], 20, lora=adapters[row % 3])
    ]
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_seqs": 9}
    base = Group(requests(prompts, 20), modes=())
    return engine, {"LoRA": Group(made, extend=True), "base": base}


MAKERS: dict[str, Callable[[Path, Path], Row]] = {
    "batching": batching, "preemption": preemption, "abort": abort, "LoRA": lora,
}  # fmt: skip
SUITES: dict[tuple[str, str], Suite] = {}
BASE_FAULT = (
    "vLLM before 0.33 on a CPU, without speculation too: beside adapters in one batch, a request "
    "of the base gets an adapter's answer (its index -1 reads the last adapter)"
)
LORA_FAULT = (
    "vLLM's model runner V2 on a CPU, beside any drafter: with LoRA it maps logits to one row a "
    "request, and a block has more (test_the_engine_alone)"
)


@pytest.fixture
def play(
    engine: EngineProcess, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Group, dict[str, Any]]]:
    """Plays a row on this combination, once: its group, and the reply of a mode."""

    def play(row: str, mode: str = "heads") -> tuple[Group, dict[str, Any]]:
        key = suite_key(row, engine)
        if key not in SUITES:
            folder = tmp_path_factory.mktemp("row")
            target = targets["llama"]
            more, groups = MAKERS[row](target, folder)
            suite = Suite(target, folder, ENGINE | more, groups)
            suite.record(engine)
            SUITES[key] = suite
        return SUITES[key].groups[row], SUITES[key].play(engine, row, mode)

    return play


def suite_key(row: str, engine: EngineProcess) -> tuple[str, str]:
    """Whose answers are compared: those of LoRA differ by release (`BASE_FAULT`)."""
    return row, engine.combo.release if row == "LoRA" else ""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.row(row)) for row in MAKERS])
def test_as_without_speculation(
    play: Any, engine: EngineProcess, request: pytest.FixtureRequest, row: str, mode: str
) -> None:
    """Ids of every request, and right inputs for the heads: with LoRA, the adapted states."""
    if (row, engine.combo.runner) == ("LoRA", "V2"):
        request.applymarker(pytest.mark.xfail(reason=LORA_FAULT, raises=KnownFaultError))
        with known_fault("add_lora_logits"):
            group, batch = play(row, mode)
    else:
        group, batch = play(row, mode)
    check_group(group, batch)
    spec, most = batch["spec"], PLACES if mode == LATTICE else NUM_HEADS
    assert 0 < spec["drafts"] <= spec["drafted"] <= most * spec["drafts"]
    assert 0 <= spec["accepted"] <= spec["drafted"]
    assert sum(spec["per_position"]) == spec["accepted"]
    if mode == LATTICE:
        assert batch["lattice"]["moved"] > 0, "no request's own text made a difference"
    if mode == "oracle" and row != "abort":  # a dropped stream may end in any step
        assert spec["accepted"] == spec["drafted"]
    assert batch["metrics"]["vllm:num_requests_running"] == 0
    assert batch["metrics"]["vllm:num_requests_waiting"] == 0
    assert batch["metrics"]["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.full
@pytest.mark.row("abort")
@pytest.mark.parametrize("mode", ["oracle", LATTICE])
def test_memory_stays_flat(play: Any, engine: EngineProcess, mode: str) -> None:
    """Minutes of dropped streams: what is left is right every time, and memory does not grow."""
    if engine.combo.runner == "V2":
        pytest.skip("interpreted kernels are too slow for so many rounds")
    play("abort")
    suite = SUITES[suite_key("abort", engine)]
    with_lattice = mode == LATTICE
    asked = suite.groups["abort"].batch("heads" if with_lattice else mode)  # a watch would grow
    job = make_job(suite.target, [asked | {"lasting": LASTING}], **suite.engine)
    job["llm"]["speculative_config"] = {"method": "bpd", "model": str(suite.heads)}
    if with_lattice:
        job["llm"]["speculative_config"] |= {"model": str(suite.lattice), "min_confidence": 0.1}
    else:
        job["drafts"] = stand_in("plugin", suite.recordings())
    [batch] = run(engine, job)["batches"]
    check_group(replace(suite.groups["abort"], repeat=ROUNDS), batch)
    assert batch["seconds"] >= LASTING
    assert batch["spec"]["accepted"] > 0
    resident = batch["resident"]
    assert resident[-1] - resident[len(resident) // 2] < GROWTH


@pytest.mark.row("batching")
def test_prefixes_are_cached(play: Any) -> None:
    """The batching row is nothing without hits."""
    for mode in MODES:
        group, batch = play("batching", mode)
        cached = [output["cached"] for output in batch["outputs"]]
        assert max(cached) >= 2 * BLOCK_SIZE
    assert any(output["cached"] for output in group.expected)


@pytest.mark.row("preemption")
def test_requests_are_preempted(play: Any) -> None:
    """The preemption row is nothing without preemptions."""
    batches = {mode: play("preemption", mode)[1] for mode in MODES}
    counts = [batches[mode]["metrics"]["vllm:num_preemptions"] for mode in SCRIPTED]
    assert 0 < counts[0] < counts[1] < counts[2]  # the counter goes on from mode to mode
    assert batches[LATTICE]["metrics"]["vllm:num_preemptions"] > 0
    # Resumed requests draft from their own text, and the drafts are what it gives (`watch`).
    assert batches[LATTICE]["lattice"]["moved_resumed"] > 0


@pytest.mark.row("LoRA")
def test_the_engine_alone(play: Any, engine: EngineProcess) -> None:
    """LoRA fails in the same place with drafts that no plugin has made (V2)."""
    if engine.combo.runner != "V2":
        pytest.skip("the fault is model runner V2's")
    if engine.combo.release == NO_STOCK_V2:
        pytest.skip("its model runner V2 takes no drafter that could stand for any")
    with contextlib.suppress(AssertionError):  # `bpd` fails; what it is compared with is recorded
        play("LoRA")
    suite = SUITES[suite_key("LoRA", engine)]
    job = make_job(suite.target, [suite.groups["LoRA"].batch("oracle")], **suite.engine)
    job["llm"]["speculative_config"] = {**STOCK_V2, "num_speculative_tokens": NUM_HEADS}
    reply = engine.run(job | {"drafts": stand_in("stock", suite.recordings())})
    assert not reply["ok"]
    assert "add_lora_logits" in reply["trace"]
    assert "einsum" in reply["error"]


@pytest.mark.row("LoRA")
def test_adapters_change_the_text(play: Any, engine: EngineProcess) -> None:
    """The LoRA row is nothing if the adapters change nothing."""
    with contextlib.suppress(AssertionError):  # of the target alone: `bpd` is not looked at here
        play("LoRA")
    groups = SUITES[suite_key("LoRA", engine)].groups
    group, base = groups["LoRA"], groups["base"]
    for request, mixed, alone in zip(group.requests, group.expected, base.expected, strict=True):
        assert not request.lora or mixed["completions"] != alone["completions"]


@pytest.mark.row("LoRA")
def test_the_base_is_itself_beside_adapters(
    play: Any, engine: EngineProcess, request: pytest.FixtureRequest
) -> None:
    """What this combination's target alone, with no speculation, answers in either batch."""
    if engine.combo.release != "0.33":
        request.applymarker(pytest.mark.xfail(reason=BASE_FAULT, raises=KnownFaultError))
    with contextlib.suppress(AssertionError):  # `bpd` is not looked at here
        play("LoRA")
    suite = SUITES[suite_key("LoRA", engine)]
    batches = [suite.groups[name].batch() for name in ("LoRA", "base")]
    reply = run(engine, make_job(suite.target, batches, **suite.engine))
    mixed, alone = (batch["outputs"] for batch in reply["batches"])
    asked = suite.groups["LoRA"].requests
    rows = [row for row, request in enumerate(asked) if request.lora is None]
    changed = [row for row in rows if mixed[row]["completions"] != alone[row]["completions"]]
    if changed and engine.combo.release != "0.33":
        raise KnownFaultError(BASE_FAULT)
    assert changed == []
