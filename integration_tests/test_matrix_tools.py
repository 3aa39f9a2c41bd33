"""Row structure, through the server: tool calls by chat, whole and streamed, thirty at once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.combos import COMBOS
from integration_tests.harness.heads import write_heads
from integration_tests.harness.server import Server, serving
from integration_tests.harness.structures import NAMED, STRICT_TOOLS
from integration_tests.harness.traffic import Ask, are_valid, make_ask, send
from integration_tests.soak import connect

CALLS = 30
NUM_HEADS = 4
OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32",
           "--num-gpu-blocks-override", "512", "--enable-auto-tool-choice",
           "--tool-call-parser", "hermes", "--structured-outputs-config",
           '{"backend": "xgrammar", "disable_any_whitespace": true}']  # fmt: skip
CHOICES: dict[str, Any] = {"named": NAMED, "required": "required"}


@pytest.fixture(scope="module")
def server(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server whose random heads draft at every step."""
    folder = tmp_path_factory.mktemp("tools")
    heads = write_heads(targets["text"], folder / "heads", NUM_HEADS)
    # Told how sure to be, many requests that sample draft on a CPU as well.
    config = {"method": "bpd", "model": str(heads), "min_confidence": 0.1}
    options = [*OPTIONS, "--speculative-config", json.dumps(config)]
    with serving(COMBOS[0], targets["text"], folder / "log.txt", options) as running:
        yield running


def asks(choice: Any, temperature: float) -> list[Ask]:
    """Chats about nothing, each with the tools."""
    draw = random.Random(91)
    options = {"tools": STRICT_TOOLS, "tool_choice": choice, "temperature": temperature}
    made = [make_ask("sampled tool", {}, draw) for _ in range(CALLS)]
    return [
        Ask(ask.kind, ask.prompt, options | {"seed": n, "max_tokens": 400})
        for n, ask in enumerate(made)
    ]


def answered(server: Server, asked: list[Ask], stream: bool) -> list[dict[str, Any]]:
    """What came of all at once: each call is checked, and that drafts were verified.

    One that must call may go on calling to its length limit, as random weights like to: the call
    that this cuts is not looked at.
    """
    client = connect(server)
    before = server.metrics().get("spec_decode_num_drafts_total", 0.0)
    with ThreadPoolExecutor(CALLS) as pool:
        answers = [answer for [answer] in pool.map(lambda ask: send(client, ask, stream), asked)]
    assert server.metrics()["spec_decode_num_drafts_total"] > before
    for answer in answers:
        if is_cut(answer):
            assert asked[0].options["tool_choice"] == "required", answer
            assert len(answer["calls"]) < 2 or are_valid(answer["calls"][:-1]), answer
        else:
            assert are_valid(answer["calls"]), answer
            assert not answer["text"].strip(), answer
    assert not all(map(is_cut, answers))
    return answers


def is_cut(answer: dict[str, Any]) -> bool:
    """Whether its length limit ended an answer."""
    return bool(answer["reason"] == "length")


@pytest.mark.row("structure", combo=COMBOS[0].name)
@pytest.mark.parametrize("choice", list(CHOICES))
def test_calls_are_the_same_streamed(server: Server, choice: str) -> None:
    """Greedy calls, in one piece and in many: valid, and the same."""
    asked = asks(CHOICES[choice], temperature=0.0)
    whole, streamed = (answered(server, asked, stream) for stream in (False, True))
    for left, right in zip(whole, streamed, strict=True):
        assert is_cut(left) == is_cut(right)
        assert is_cut(left) or left["calls"] == right["calls"]


@pytest.mark.row("structure", combo=COMBOS[0].name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", list(CHOICES))
def test_sampled_calls_are_valid(server: Server, choice: str, stream: bool) -> None:
    """Drawn at random, each call is of a tool there is, with arguments it takes; they vary."""
    answers = answered(server, asks(CHOICES[choice], temperature=1.0), stream)
    assert len({str(one["calls"]) for one in answers}) > 1
    if choice == "named":
        assert all([name for name, _ in one["calls"]] == ["on"] for one in answers)


def test_the_check_sees_what_is_no_call() -> None:
    """No call, another tool, other arguments, none at all."""
    assert are_valid([["on", {"at": 12}], ["in", {"ab": True, "kind": "in"}]])
    for wrong in ([], [["off", {"at": 12}]], [["on", {"at": 3}]], [["on", '{"at": 1']]):
        assert not are_valid(wrong)
