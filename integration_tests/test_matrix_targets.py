"""Row targets: other architectures, vocabularies and precisions; and row numerics for the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.jobs import make_prompts
from integration_tests.harness.matrix import MODES, Group, Request, Suite, check_group
from integration_tests.harness.targets import TARGETS

MAX_TOKENS = 32  # past a sliding window of 24
PROMPTS_OF = [3, 16, 25, 40]
ENGINE = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 256}
EXACT = ("odd-vocabulary", "odd-tied", "qwen3", "mistral-window", "gemma2", "gemma3", "int8")
ROUNDED = ("bfloat16", "float16")
# Two logits closer than this many rounding steps of the larger one may change places.
STEPS = 2
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SUITES: dict[str, Suite] = {}


@pytest.fixture
def play(
    engine: EngineProcess, targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Plays a target on this combination, once: its group, and the reply of a mode."""

    def play(name: str, mode: str) -> tuple[Group, dict[str, Any]]:
        if name not in SUITES:
            sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            if name in ROUNDED:
                sampling["logprobs"] = 2
            prompts = make_prompts(PROMPTS_OF, TARGETS[name].vocab, seed=51)
            requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
            more = {"dtype": "auto"} if name in ROUNDED else {}
            group = Group(requests, extend=True)
            folder = tmp_path_factory.mktemp(name)
            suite = Suite(targets[name], folder, ENGINE | more, {name: group})
            suite.record(engine)
            SUITES[name] = suite
        return SUITES[name].groups[name], SUITES[name].play(engine, name, mode)

    return play


@pytest.mark.row("targets")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXACT)
def test_as_without_speculation(play: Any, name: str, mode: str) -> None:
    """Ids of every request; no id beyond the vocabulary is drafted or comes."""
    group, batch = play(name, mode)
    check_group(group, batch)
    # Of "odd-vocabulary" every real id scores below what a row of padding would.
    assert 0 <= batch["highest_draft"] < TARGETS[name].vocab
    assert batch["spec"]["drafted"] > 0
    if mode == "oracle":
        assert batch["spec"]["accepted"] == batch["spec"]["drafted"]


@pytest.mark.row("numerics")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_alone_differs(play: Any, name: str, mode: str) -> None:
    """Up to the first other token, which only comes where the two best are within rounding."""
    group, batch = play(name, mode)
    same = 0
    for expected, found in zip(group.expected, batch["outputs"], strict=True):
        left, right = expected["completions"][0], found["completions"][0]
        pairs = zip(left["token_ids"], right["token_ids"], strict=True)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            same += 1
            continue
        margin, scale = top_two(left["logprobs"][first])
        assert margin <= STEPS * EPSILON[name] * scale, f"at token {first}"
    assert same > 0
    assert batch["spec"]["drafted"] > 0


def top_two(row: dict[str, list[float]]) -> tuple[float, float]:
    """How far the two best logprobs lie apart, and a bound on their logits.

    The final norm makes a state of length 8, a row of the LM head is 2.4 long: at most 19.2.
    """
    best, second = sorted((entry[0] for entry in row.values()), reverse=True)[:2]
    return best - second, 32.0
