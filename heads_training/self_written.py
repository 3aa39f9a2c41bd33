"""Prompts that the target writes itself: user turns, passages for tasks, second turns.

User turns need no data set: the chat template's user prefix is completed by the target, sampled.
An *opener* (the first words of a task) steers each completion, because unsteered ones are short
questions of one kind and heads trained on them do badly elsewhere (docs/lab-notes.md).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from heads_training.chat import Message, prompt_ids, user_prefix
from heads_training.engines import Completion, Engine, Request
from heads_training.passages import Task
from heads_training.prompts import Prompt

_SHORTEST_TURN = 12  # characters; shorter ones are openers the target left unfinished
_SHORTEST_PASSAGE = 40  # characters
_SECOND_TURN_TOKENS = 96
_TURN_TEMPERATURE = 1.0  # user turns are to differ
_PASSAGE_TEMPERATURE = 0.7  # at 1.0 a small target writes no text that a task could be about
_TOP_P = 0.95

# (opener, weight, longest completion in tokens). The empty opener lets the target choose.
OPENERS: tuple[tuple[str, int, int], ...] = (
    ("", 8, 96),
    ("What ", 3, 48),
    ("Who ", 3, 32),
    ("When ", 2, 32),
    ("Where ", 2, 32),
    ("How many ", 2, 48),
    ("How do ", 2, 48),
    ("Why ", 2, 48),
    ("Which ", 1, 48),
    ("Explain ", 3, 64),
    ("Describe ", 2, 64),
    ("Discuss ", 1, 64),
    ("Compare ", 2, 64),
    ("Write a ", 3, 64),
    ("Write a short story ", 1, 64),
    ("Write an email ", 2, 96),
    ("Write a Python ", 3, 64),
    ("Write code ", 1, 64),
    ("Implement ", 1, 64),
    ("Pretend you are ", 1, 64),
    ("Imagine you are ", 1, 64),
    ("Give me ", 2, 64),
    ("List ", 2, 64),
    ("Help me ", 1, 64),
    ("Solve ", 2, 64),
    ("Calculate ", 1, 64),
    ("If ", 2, 96),
    ("Summarize: ", 5, 448),
    ("Summarize the following article:\n\n", 4, 448),
    ("Please summarise this text in a few sentences.\n\n", 3, 448),
    ("Translate to English: ", 4, 64),
    ("Translate German to English: ", 5, 64),
    ("Translate French to English: ", 3, 64),
    ("Translate the following sentence into German: ", 2, 64),
    ("Rewrite the following paragraph:\n\n", 3, 256),
    ("Extract the names and dates from this text:\n\n", 3, 256),
    ("Extract the following information from the text:\n", 2, 256),
    ("Classify the sentiment of these reviews:\n1. ", 2, 192),
    ("Answer the question using the context.\n\nContext: ", 5, 384),
    ("Read the passage and answer the question.\n\nPassage: ", 4, 384),
)


def pick_openers(count: int, seed: int) -> list[tuple[str, int]]:
    """`count` (opener, longest completion in tokens), drawn by weight; the same for one seed."""
    rng = random.Random(seed)
    weights = [weight for _, weight, _ in OPENERS]
    return [(text, limit) for text, _, limit in rng.choices(OPENERS, weights, k=count)]


def request_seed(*parts: int | str) -> int:
    """A seed for one request, spread so that no two requests share one. 0 .. 2**31 - 1."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def write_user_turns(
    engine: Engine, tokenizer: Any, openers: Sequence[tuple[str, int]], seed: int
) -> list[Prompt | None]:
    """User turns sampled behind the template's user prefix and an opener each, in order.

    None where the target left its opener unfinished. Raises HeadsError without a chat template.
    """
    if not openers:
        return []
    prefix = user_prefix(tokenizer)
    texts = _sample(
        engine,
        tokenizer,
        [(_encode(tokenizer, prefix + text), limit) for text, limit in openers],
        _TURN_TEMPERATURE,
        (seed, "user"),
    )
    prompts: list[Prompt | None] = []
    for (opener, _), completion in zip(openers, texts, strict=True):
        text = (opener + completion).strip()
        source = "self-written:" + (opener.strip() or "free")
        usable = len(text) >= _SHORTEST_TURN
        prompts.append(Prompt(({"role": "user", "content": text},), source) if usable else None)
    return prompts


def write_tasks(
    engine: Engine, tokenizer: Any, tasks: Sequence[Task], seed: int
) -> list[Prompt | None]:
    """Each task with the passages that the target wrote for it, in order; None if one is empty."""
    asked = [
        (prompt_ids(tokenizer, [{"role": "user", "content": request}]), task.passage_tokens)
        for task in tasks
        for request in task.requests
    ]
    texts = iter(_sample(engine, tokenizer, asked, _PASSAGE_TEMPERATURE, (seed, "passage")))
    prompts: list[Prompt | None] = []
    for task in tasks:
        passages = [next(texts).strip() for _ in task.requests]
        usable = all(len(passage) >= _SHORTEST_PASSAGE for passage in passages)
        prompts.append(task.prompt(passages) if usable else None)
    return prompts


def write_second_turns(
    engine: Engine, tokenizer: Any, answered: Sequence[tuple[Prompt, list[int]]], seed: int
) -> list[Prompt | None]:
    """Each conversation, (prompt, its answer's ids), with a second user turn sampled behind it.

    In order; None where the target had nothing more to ask.
    """
    histories: list[list[Message]] = [
        [*prompt.messages, {"role": "assistant", "content": _decode(tokenizer, answer)}]
        for prompt, answer in answered
    ]
    asked = [
        (_encode(tokenizer, user_prefix(tokenizer, history)), _SECOND_TURN_TOKENS)
        for history in histories
    ]
    texts = _sample(engine, tokenizer, asked, _TURN_TEMPERATURE, (seed, "second"))
    prompts: list[Prompt | None] = []
    for history, (prompt, _), completion in zip(histories, answered, texts, strict=True):
        text = completion.strip()
        turn = {"role": "user", "content": text}
        usable = len(text) >= _SHORTEST_TURN
        prompts.append(Prompt((*history, turn), f"second-{prompt.source}") if usable else None)
    return prompts


def _sample(
    engine: Engine,
    tokenizer: Any,
    asked: Sequence[tuple[list[int], int]],
    temperature: float,
    seed: tuple[int | str, ...],
) -> list[str]:
    """Sampled text behind each (prompt ids, longest completion in tokens)."""
    requests = [
        Request(ids, limit, temperature, _TOP_P, request_seed(*seed, i))
        for i, (ids, limit) in enumerate(asked)
    ]
    completions: list[Completion] = engine.complete(requests) if requests else []
    return [_decode(tokenizer, completion.token_ids) for completion in completions]


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
