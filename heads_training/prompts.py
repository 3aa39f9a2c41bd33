"""Conversations and prompts from JSONL files and from data sets of the `datasets` library.

Both may hold, in each record, a list `messages` (role, content), a list `conversations`
(ShareGPT's from, value) or a string `prompt`; of several, the first of these counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads_training.chat import Message
from vllm_bpd.errors import HeadsError, read_json_lines

_SHAPES = "a string `prompt`, or a list `messages` (role, content) or `conversations` (from, value)"
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
# Builder of the `datasets` library for a local file.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Conversation:
    """A conversation as it was given, the assistant's turns included."""

    messages: tuple[Message, ...]
    source: str  # the file's or data set's name; kept beside answers for per-source figures
    where: str  # file and line, or data set and row, for error messages


@dataclass(frozen=True)
class Prompt:
    """A conversation whose next turn is to be answered."""

    messages: tuple[Message, ...]
    source: str


def to_prompt(conversation: Conversation) -> Prompt:
    """The conversation up to its last user turn: the answer behind it is the target's to write.

    Raises HeadsError if there is no user turn.
    """
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise HeadsError(f"{conversation.where}: found no user turn; expected at least one")
    return Prompt(tuple(messages), conversation.source)


def digest(conversations: Iterable[Conversation]) -> str:
    """sha256 (hex) over what was read, wherever it lay."""
    found = hashlib.sha256()
    for conversation in conversations:
        found.update(json.dumps(conversation.messages, sort_keys=True).encode() + b"\n")
    return found.hexdigest()


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a JSONL file, one object a line.

    Raises HeadsError naming file, line and what was found.
    """
    conversations = [
        _conversation(record, path.stem, where)
        for where, record in read_json_lines(path, "a prompt file")
    ]
    if not conversations:
        raise HeadsError(f"{path}: no prompts found; expected at least one JSON object a line")
    return conversations


def read_dataset(
    name: str, config: str | None = None, split: str = "train", rows: int = 0, seed: int = 0
) -> list[Conversation]:
    """The conversations of a data set: a hub id, a folder, or a JSONL, JSON, Parquet or CSV file.

    `rows` takes that many at most, drawn by `seed`; 0 takes all, in order. Raises HeadsError for a
    data set that cannot be loaded, columns of another shape, and a row that is not as its column.
    """
    data = _load(name, config, split)
    columns = [
        name for name in ("messages", "conversations", "prompt") if name in data.column_names
    ]
    if not columns:
        found = ", ".join(sorted(data.column_names))
        raise HeadsError(f"dataset: {name}: found the columns {found}; expected {_SHAPES}")
    if 0 < rows < len(data):
        data = data.shuffle(seed=seed).select(range(rows))
    data = data.select_columns(columns)
    source = Path(name).stem if Path(name).exists() else name
    return [
        _conversation(record, source, f"dataset: {name}: {split} row {number}")
        for number, record in enumerate(data)
    ]


def _load(name: str, config: str | None, split: str) -> Any:
    """One split of a data set, as the library's own table."""
    try:
        import datasets
    except ImportError:
        raise HeadsError(
            "dataset: needs the `datasets` package; pip install 'vllm-bpd[train]'"
        ) from None
    path, files = Path(name), None
    if path.is_file():
        builder = _BUILDERS.get(path.suffix)
        if builder is None:
            raise HeadsError(
                f"dataset: {name}: found a {path.suffix or 'nameless'} file; expected one of "
                + ", ".join(_BUILDERS)
            )
        name, files = builder, str(path)
    try:
        return datasets.load_dataset(name, config, data_files=files, split=split)
    except Exception as error:  # the library raises many kinds, some of them its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadsError(
            f"dataset: {path}: split {split}, config {config}: cannot be loaded ({reason}); "
            "expected a hub id, a folder or a file, and one of its splits and configs"
        ) from None


def _conversation(record: Any, source: str, where: str) -> Conversation:
    """One record of any of the three shapes."""
    if isinstance(record, dict):
        for column, role, text in (
            ("messages", "role", "content"),
            ("conversations", "from", "value"),
        ):
            if isinstance(record.get(column), list):
                turns = [_turn(turn, role, text, where) for turn in record[column]]
                return Conversation(tuple(turns), source, where)
        if isinstance(record.get("prompt"), str):
            return Conversation(({"role": "user", "content": record["prompt"]},), source, where)
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    raise HeadsError(f"{where}: found {found}; expected {_SHAPES}")


def _turn(turn: Any, role: str, text: str, where: str) -> Message:
    named = isinstance(turn, dict) and isinstance(turn.get(role), str)
    if not named or not isinstance(turn.get(text), str):
        raise HeadsError(f"{where}: found turn {turn!r}; expected strings `{role}` and `{text}`")
    return {"role": _ROLES.get(turn[role], turn[role]), "content": turn[text]}
