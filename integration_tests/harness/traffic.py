"""Mixed requests to a server, made from a seed, and what to compare of their answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from integration_tests.harness.jobs import make_prompts
from integration_tests.harness.tokenizer import vocabulary

GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "to the end of the text": {},
    "one token": {"max_tokens": 1},
    "logprobs": {"logprobs": 2, "max_tokens": 20},
    "stop strings": {"stop": ["a", "Q", "}"], "logprobs": 0},
    "stop included": {"stop": ["e", "x"], "include_stop_str_in_output": True},
    "least length": {"min_tokens": 9, "max_tokens": 30},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bad words": {"bad_words": ["b", "th"]},
    "allowed ids": {"allowed_token_ids": list(range(10, 90, 2)), "ignore_eos": True},
    "regex": {"structured_outputs": {"regex": r"[a-c]{3}-(12|34)[0-9]{2}(the|then)"}},
    "schema": {
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"ab": {"type": "boolean"}, "kind": {"enum": ["in", "on"]}},
                "required": ["ab", "kind"],
                "additionalProperties": False,
            }
        }
    },
}
# No answer is recorded for these: they are drawn at random.
SAMPLED: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0, "max_tokens": 40},
    "top_p, two answers": {"temperature": 0.8, "top_p": 0.9, "n": 2, "max_tokens": 20},
    "top_k": {"temperature": 1.2, "top_k": 5, "max_tokens": 20},
}
OWN = ("max_tokens", "temperature", "top_p", "n", "stop", "logprobs", "presence_penalty",
       "frequency_penalty", "seed")  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request: its kind, prompt and options."""

    kind: str
    prompt: list[int]
    options: dict[str, Any]

    @property
    def recorded(self) -> bool:
        """Whether the same answer must always come."""
        return self.kind in GREEDY


def catalogue(count: int, seed: int = 7) -> list[Ask]:
    """`count` requests of every greedy kind, with prompts of 1 to 180 tokens."""
    draw = random.Random(seed)
    asks = []
    for kind, options in GREEDY.items():
        lengths = [draw.choice((1, 5, 17, 33, 64, 90, 128, 180)) for _ in range(count)]
        for prompt in make_prompts(lengths, len(vocabulary()), seed=draw.randrange(1 << 30)):
            asks.append(Ask(kind, prompt, {"temperature": 0, "max_tokens": 48, **options}))
    return asks


def sampled(draw: random.Random) -> Ask:
    """A request whose answer is drawn at random."""
    kind = draw.choice(list(SAMPLED))
    length = draw.choice((3, 40, 100))
    [prompt] = make_prompts([length], len(vocabulary()), seed=draw.randrange(1 << 30))
    return Ask(kind, prompt, SAMPLED[kind])


def send(client: OpenAI, ask: Ask, stream: bool, drop_after: int | None = None) -> Any:
    """The answer: text, finish reason and tokens of logprobs; None for a dropped stream."""
    own = {name: value for name, value in ask.options.items() if name in OWN}
    body = {name: value for name, value in ask.options.items() if name not in OWN}
    asked = {"model": "served", "prompt": ask.prompt, "extra_body": body, **own}
    if not stream:
        choice = client.completions.create(**asked).choices[0]
        return [choice.text, choice.finish_reason, logprob_tokens(choice)]
    text, reason, tokens = "", None, []
    with client.completions.create(**asked, stream=True) as chunks:
        for number, chunk in enumerate(chunks):
            if drop_after is not None and number >= drop_after:
                return None
            for choice in chunk.choices[:1]:
                text += choice.text
                reason = choice.finish_reason or reason
                tokens += logprob_tokens(choice)
    return [text, reason, tokens]


def logprob_tokens(choice: Any) -> list[str]:
    """The tokens that logprobs were given for."""
    return list(choice.logprobs.tokens) if choice.logprobs else []
