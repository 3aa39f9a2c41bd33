"""Prompts: read from JSONL, or written by the target itself.

Self-written prompts need no data set: the chat template's user prefix is completed by the
target, sampled. An *opener* (the first words of a task) steers each completion, because
unsteered ones are short questions of one kind and heads trained on them do badly elsewhere
(docs/lab-notes.md).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_bpd.errors import HeadsError

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


@dataclass(frozen=True)
class Prompt:
    """One conversation whose next turn the target is to write."""

    messages: tuple[dict[str, str], ...]
    source: str  # where it came from; kept beside the answer for per-source figures


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file with `prompt`, `messages` or ShareGPT `conversations` a line.

    Raises HeadsError naming file, line and what was found.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HeadsError(f"{path}: not readable as a prompt file ({error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise HeadsError(f"{where}: not JSON ({error}); expected one object a line") from None
        prompts.append(Prompt(tuple(_messages(record, where)), path.stem))
    if not prompts:
        raise HeadsError(f"{path}: no prompts found; expected at least one JSON object a line")
    return prompts


def _messages(record: Any, where: str) -> list[dict[str, str]]:
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str):
            return [{"role": "user", "content": record["prompt"]}]
        if isinstance(record.get("messages"), list):
            return _up_to_last_user(record["messages"], "role", "content", where)
        if isinstance(record.get("conversations"), list):
            return _up_to_last_user(record["conversations"], "from", "value", where)
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    raise HeadsError(
        f"{where}: found {found}; expected a string `prompt`, or a list `messages` "
        "(role, content) or `conversations` (from, value)"
    )


def _up_to_last_user(turns: list[Any], role: str, text: str, where: str) -> list[dict[str, str]]:
    """Turns up to the last user turn: the answer behind it is the target's to write."""
    names = {"human": "user", "gpt": "assistant"}
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get(text), str) or role not in turn:
            raise HeadsError(f"{where}: found turn {turn!r}; expected keys `{role}` and `{text}`")
        messages.append({"role": names.get(turn[role], turn[role]), "content": turn[text]})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise HeadsError(f"{where}: found no user turn; expected at least one")
    return messages


def pick_openers(count: int, seed: int) -> list[tuple[str, int]]:
    """`count` (opener, longest completion in tokens), drawn by weight; the same for one seed."""
    rng = random.Random(seed)
    weights = [weight for _, weight, _ in OPENERS]
    return [(text, limit) for text, _, limit in rng.choices(OPENERS, weights, k=count)]


def user_prefix(tokenizer: Any) -> str:
    """The chat template's text up to where a first user turn begins.

    Raises HeadsError if the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise HeadsError(
            "chat_template: found none in the target's tokenizer; expected one, since prompts "
            "are self-written after its user prefix; give --prompts FILE.jsonl instead"
        )
    mark = "\u241fbpd-user-turn\u241f"
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=False
    )
    return text[: text.index(mark)]
