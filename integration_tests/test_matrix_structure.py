"""Row structure: schemas, regexes, grammars and tool calls, thirty at once; a thought's end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.jobs import greedy, make_job, make_prompts, record, run
from integration_tests.harness.matrix import (
    BLOCK,
    LATTICE,
    MODES,
    Group,
    Request,
    Suite,
    check_group,
)
from integration_tests.harness.structures import (
    CALL,
    CHOICE,
    GRAMMAR,
    NAMED,
    REGEX,
    SCHEMA,
    TOOLS,
    are_arguments,
    are_calls,
    follows_schema,
)
from integration_tests.harness.tokenizer import EOS, THINK_END, vocabulary

MAX_TOKENS = 40
ENGINE: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@dataclass(frozen=True)
class Kind:
    """A kind of structure: what is asked for, and whether a text is of it."""

    asked: dict[str, Any]
    holds: Callable[[str], Any]
    max_tokens: int = MAX_TOKENS


KINDS = {
    "schema": Kind({"json": SCHEMA}, follows_schema),
    "regex": Kind({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "grammar": Kind({"grammar": GRAMMAR}, CALL.fullmatch),
    "choice": Kind({"choice": CHOICE}, CHOICE.__contains__),
    "tool": Kind({"tools": TOOLS, "tool_choice": NAMED}, are_arguments),
    "tools": Kind({"tools": TOOLS, "tool_choice": "required"}, are_calls, max_tokens=176),
}
# Thirty at once, and two without any structure among them.
ORDER = [list(KINDS)[row % len(KINDS)] for row in range(30)]
SUITES: dict[tuple[str, str], Suite] = {}


def structured(prompts: list[list[int]], **sampling: Any) -> list[Request]:
    """Thirty structured requests, then two plain ones."""
    requests = [
        Request(
            f"{row} {kind}",
            prompt,
            {
                **sampling,
                "max_tokens": KINDS[kind].max_tokens,
                "structured_outputs": KINDS[kind].asked,
            },
        )
        for row, (kind, prompt) in enumerate(zip(ORDER, prompts, strict=False))
    ]
    plain = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return requests + [Request("plain", prompt, plain) for prompt in prompts[len(ORDER) :]]


@pytest.fixture
def suite(
    engine: EngineProcess, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Suite:
    """Greedy and sampled requests. What a grammar allows differs by release: white space."""
    key = ("text", engine.combo.release)
    if key not in SUITES:
        prompts = make_prompts([4 + n % 7 for n in range(64)], len(vocabulary()), seed=61)
        sampled = structured(prompts[32:], temperature=1.0)
        for seed, request in enumerate(sampled):
            request.sampling["seed"] = seed
        groups = {
            "greedy": Group(structured(prompts[:32], temperature=0), processors=True),
            "sampled": Group(sampled, processors=True, modes=("heads", LATTICE)),
        }
        made = Suite(targets["text"], tmp_path_factory.mktemp("structure"), ENGINE, groups)
        made.record(engine)
        SUITES[key] = made
    return SUITES[key]


def check_valid(group: Group, batch: dict[str, Any]) -> None:
    """Every structured answer is of its kind."""
    for request, output in zip(group.requests, batch["outputs"], strict=True):
        [completion] = output["completions"]
        if request.name != "plain":
            assert completion["finish_reason"] == "stop", request.name
            assert KINDS[request.name.split()[1]].holds(completion["text"]), completion["text"]


@pytest.mark.row("structure")
@pytest.mark.parametrize("mode", MODES)
def test_structured_as_without_speculation(suite: Suite, engine: EngineProcess, mode: str) -> None:
    """Thirty at once: the target's own answers, hence valid."""
    batch = suite.play(engine, "greedy", mode)
    check_group(suite.groups["greedy"], batch)
    check_valid(suite.groups["greedy"], batch)
    assert batch["spec"]["drafted"] > 0


@pytest.mark.row("structure")
@pytest.mark.parametrize("mode", ["heads", LATTICE])
def test_sampled_structure_is_valid(suite: Suite, engine: EngineProcess, mode: str) -> None:
    """Drawn at random, the answers are still of their kinds."""
    batch = suite.play(engine, "sampled", mode)
    check_valid(suite.groups["sampled"], batch)
    assert batch["faults"] == []


@pytest.fixture
def thoughts(
    engine: EngineProcess, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Suite:
    """Requests whose thought ends at each offset inside a block; a regex holds from there on."""
    key = ("think", engine.combo.release)
    if key not in SUITES:
        prompts = make_prompts([4 + n % 7 for n in range(200)], len(vocabulary()), seed=62)
        roomy = ENGINE | {"max_num_seqs": 128}
        reply = run(engine, make_job(targets["think"], [greedy(prompts, 16)], **roomy))
        at: dict[int, list[int]] = {}
        for recording in record(prompts, reply["batches"][0]):
            answer = recording.answer
            if THINK_END in answer and EOS not in answer[: answer.index(THINK_END)]:
                at.setdefault(answer.index(THINK_END), recording.prompt)
        places = range(1, BLOCK + 3)
        assert set(places) <= at.keys(), "no thought ends at some offset"
        asked = {"structured_outputs": {"regex": REGEX}, "temperature": 0}
        asked |= {"max_tokens": MAX_TOKENS, "skip_special_tokens": False}
        requests = [Request(f"ends at {place}", at[place], asked) for place in places]
        reasoning = dict(ENGINE["structured_outputs_config"], reasoning_parser="deepseek_r1")
        engine_options = ENGINE | {"structured_outputs_config": reasoning}
        groups = {"thoughts": Group(requests, processors=True)}
        folder = tmp_path_factory.mktemp("think")
        made = Suite(targets["think"], folder, engine_options, groups)
        made.record(engine)
        SUITES[key] = made
    return SUITES[key]


@pytest.mark.row("structure")
@pytest.mark.parametrize("mode", MODES)
def test_a_thought_ends_inside_a_block(thoughts: Suite, engine: EngineProcess, mode: str) -> None:
    """The grammar holds from the first token behind the thought, wherever in a block that is."""
    group = thoughts.groups["thoughts"]
    batch = thoughts.play(engine, "thoughts", mode)
    for output in batch["outputs"]:
        thought, answer = output["completions"][0]["text"].split("</think>", 1)
        assert re.fullmatch(REGEX + "(<eos>)?", answer), (thought, answer)
    check_group(group, batch)
