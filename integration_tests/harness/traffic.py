"""Mixed requests to a server, made from a seed, and what to compare of their answers."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from integration_tests.harness.jobs import make_prompts
from integration_tests.harness.structures import (
    ARGUMENTS_OF,
    CALL,
    CHOICE,
    GRAMMAR,
    NAMED,
    REGEX,
    SCHEMA,
    STRICT_TOOLS,
    follows_schema,
)
from integration_tests.harness.tokenizer import SPECIALS, vocabulary

CONTEXT = 256  # tokens; a server of this traffic has to be told
TO_THE_END = "to the context's end"
TOGETHER = "three prompts at once"
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "to the end of the text": {},
    TO_THE_END: {"ignore_eos": True},
    TOGETHER: {"max_tokens": 24},
    "one token": {"max_tokens": 1},
    "logprobs": {"logprobs": 2, "max_tokens": 20},
    "prompt logprobs": {"prompt_logprobs": 1, "max_tokens": 12},
    "stop strings": {"stop": ["a", "Q", "}"], "logprobs": 0},
    "stop included": {"stop": ["e", "x"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": list(range(8, 60, 6)), "ignore_eos": True},
    "least length": {"min_tokens": 9, "max_tokens": 30},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bad words": {"bad_words": ["b", "th"]},
    "allowed ids": {"allowed_token_ids": list(range(10, 90, 2)), "ignore_eos": True},
    "beam search": {"use_beam_search": True, "n": 2, "max_tokens": 6},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "choice": {"structured_outputs": {"choice": CHOICE}},
    "named tool": {"tools": STRICT_TOOLS, "tool_choice": NAMED},
    "required tool": {"tools": STRICT_TOOLS, "tool_choice": "required", "max_tokens": 120},
}
# Drawn at random, so that no answer is recorded. Of those with a structure it is checked.
SAMPLED: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0, "max_tokens": 40},
    "seeded": {"temperature": 1.0, "seed": 11, "max_tokens": 40},
    "top_p, two answers": {"temperature": 0.8, "top_p": 0.9, "n": 2, "max_tokens": 20},
    "top_k": {"temperature": 1.2, "top_k": 5, "max_tokens": 20},
    "sampled regex": {"structured_outputs": {"regex": REGEX}, "temperature": 1.0},
    "sampled schema": {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0},
    "sampled grammar": {"structured_outputs": {"grammar": GRAMMAR}, "temperature": 1.0},
    "sampled tool": {
        "tools": STRICT_TOOLS,
        "tool_choice": "required",
        "temperature": 1.0,
        "max_tokens": 120,
    },
}
# The engine takes these without speculation alone.
REFUSED: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2, "temperature": 1.0, "max_tokens": 8},
    "logit bias": {"logit_bias": {"5": 2.0}, "temperature": 1.0, "max_tokens": 8},
}
REFUSAL = "not yet supported with speculative decoding"
KINDS = {**GREEDY, **SAMPLED, **REFUSED}
HOLDS: dict[str, Callable[[str], Any]] = {
    "sampled regex": re.compile(REGEX).fullmatch,
    "sampled schema": follows_schema,
    "sampled grammar": CALL.fullmatch,
}
# The API gives these in one piece alone.
NEVER_STREAMED = ("prompt logprobs", "beam search")
OWN = ("max_tokens", "temperature", "top_p", "n", "stop", "logprobs", "presence_penalty",
       "frequency_penalty", "seed", "logit_bias", "tools", "tool_choice")  # fmt: skip
# Of two logprobs that are the same: they are summed in other orders beside other requests.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Ask:
    """One request: its kind, prompt (of a chat, a text; or several prompts) and options."""

    kind: str
    prompt: Any
    options: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it goes to the chat endpoint."""
        return "tools" in self.options

    @property
    def streams(self) -> bool:
        """Whether it can be streamed."""
        return self.kind not in NEVER_STREAMED


def catalogue(count: int, seed: int = 7) -> list[Ask]:
    """`count` requests of every greedy kind, with prompts of 1 to 180 tokens."""
    draw = random.Random(seed)
    return [make_ask(kind, {"temperature": 0}, draw) for kind in GREEDY for _ in range(count)]


def sampled(draw: random.Random) -> Ask:
    """A request whose answer is drawn at random, or refused."""
    return make_ask(draw.choice([*SAMPLED, *REFUSED]), {}, draw)


def make_ask(kind: str, more: dict[str, Any], draw: random.Random) -> Ask:
    """A request of a kind, its prompt drawn."""
    options = {"max_tokens": 48, **more, **KINDS[kind]}

    def prompt(lengths: tuple[int, ...]) -> list[int]:
        length = draw.choice(lengths)
        return make_prompts([length], len(vocabulary()), seed=draw.randrange(1 << 30))[0]

    if "tools" in options:
        letters = [token for token in vocabulary() if token.isascii() and token not in SPECIALS]
        return Ask(kind, "".join(draw.choices(letters, k=draw.choice((2, 12, 40)))), options)
    if kind == TOGETHER:
        return Ask(kind, [prompt((3, 20, 40)) for _ in range(3)], options)
    if kind == TO_THE_END:
        ids = prompt((180, 219, 240, 254))
        return Ask(kind, ids, options | {"max_tokens": CONTEXT - len(ids)})
    if "seed" in options:  # on a CPU vLLM ends of one whose prompt takes two steps (`SEED_FAULT`)
        return Ask(kind, prompt((1,)), options)
    return Ask(kind, prompt((1, 5, 17, 33, 64, 90, 128, 180)), options)


def send(client: OpenAI, ask: Ask, stream: bool, drop_after: int | None = None) -> Any:
    """The answers' texts, finish reasons and logprobs, or calls; None for a dropped stream."""
    own = {name: value for name, value in ask.options.items() if name in OWN}
    body = {name: value for name, value in ask.options.items() if name not in OWN}
    asked = {"model": "served", "extra_body": body, "stream": stream and ask.streams, **own}
    reply: Any  # one answer, or a stream of pieces
    if ask.is_chat:
        messages: Any = [{"role": "user", "content": ask.prompt}]
        reply = client.chat.completions.create(messages=messages, **asked)
        take: Callable[[dict[int, Any], Any], None] = take_chat
    else:
        reply = client.completions.create(prompt=ask.prompt, **asked)
        take = take_completion
    found: dict[int, Any] = {}
    if not asked["stream"]:
        take(found, reply)
        return finished(ask, found)
    with reply as chunks:
        for number, chunk in enumerate(chunks):
            if drop_after is not None and number >= drop_after:
                return None
            take(found, chunk)
    return finished(ask, found)


def take_completion(found: dict[int, Any], piece: Any) -> None:
    """Add a piece of the answers, or all of them, by their index."""
    for choice in piece.choices:
        answer = found.setdefault(choice.index, {"text": "", "reason": None, "logprobs": []})
        answer["text"] += choice.text
        answer["reason"] = choice.finish_reason or answer["reason"]
        if choice.logprobs:
            rows = choice.logprobs
            answer["logprobs"] += zip(rows.tokens, rows.token_logprobs, strict=True)
        more = choice.model_extra or {}
        if more.get("stop_reason") is not None:
            answer["stop"] = more["stop_reason"]
        of_prompt = more.get("prompt_logprobs")
        if of_prompt is not None:
            answer["prompt"] = [
                row and {token: entry["logprob"] for token, entry in row.items()}
                for row in of_prompt
            ]


def take_chat(found: dict[int, Any], piece: Any) -> None:
    """Add a piece of the answers, or all of them, by their index: what was said, what called."""
    for choice in piece.choices:
        answer = found.setdefault(choice.index, {"text": "", "reason": None, "calls": {}})
        said = choice.delta if hasattr(choice, "delta") else choice.message
        answer["text"] += said.content or ""
        answer["reason"] = choice.finish_reason or answer["reason"]
        for place, call in enumerate(said.tool_calls or []):
            place = getattr(call, "index", place)
            name, arguments = answer["calls"].get(place, ("", ""))
            name += call.function.name or ""
            answer["calls"][place] = (name, arguments + (call.function.arguments or ""))


def finished(ask: Ask, found: dict[int, Any]) -> list[Any]:
    """The answers in order; a call's arguments as what they say, however they are spaced."""
    if ask.is_chat:
        for answer in found.values():
            answer["calls"] = [
                [name, said(arguments)] for _, (name, arguments) in sorted(answer["calls"].items())
            ]
    return [found[index] for index in sorted(found)]


def said(arguments: str) -> Any:
    """What the JSON text says; the text itself where it is none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def alike(expected: Any, found: Any) -> bool:
    """Whether two answers are the same, logprobs within tolerance."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(
            alike(value, found[name]) for name, value in expected.items()
        )
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(alike, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, abs_tol=TOLERANCE)
    return bool(expected == found)


def broken(ask: Ask, answers: Iterable[dict[str, Any]]) -> str:
    """What of answers drawn at random is not of the structure asked for; nothing if all is.

    Those that their length limit cut are not looked at.
    """
    for answer in answers:
        if answer["reason"] == "length":
            continue
        if ask.is_chat and not are_valid(answer["calls"]):
            return str(answer)
        if ask.kind in HOLDS and not holds(HOLDS[ask.kind], answer["text"]):
            return str(answer)
    return ""


def are_valid(calls: list[list[Any]]) -> bool:
    """Whether there are calls, each of a tool there is, with arguments that it takes."""
    return bool(calls) and all(
        name in ARGUMENTS_OF and holds(ARGUMENTS_OF[name], json.dumps(arguments))
        for name, arguments in calls
    )


def holds(check: Callable[[str], Any], text: str) -> bool:
    """Whether a text is of a structure; what is no JSON at all is of none."""
    try:
        return bool(check(text))
    except (ValueError, TypeError, KeyError):
        return False
