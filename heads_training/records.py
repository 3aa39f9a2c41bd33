"""Answer records, and the JSONL files and folders that hold them.

One JSON object a line: `prompt_token_ids`, `answer_token_ids`, `finish_reason`, `source`. Heads
are trained on exactly what the served target reads and says, token for token, so ids are stored
and text is never tokenised again. Where the prompt ends is stored, not searched for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_bpd.errors import HeadsError, read_json_lines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One answer, as `heads_training.generate` wrote it."""

    prompt_token_ids: list[int]  # at least one
    answer_token_ids: list[int]  # at least one, the end-of-text token included if there was one
    finish_reason: str  # the engine's: stop or length; or given, for an answer of a data set
    source: str  # where the prompt came from


def chunk_paths(folder: Path) -> list[Path]:
    """The finished answer files of `folder`, in order."""
    return sorted(folder.glob("answers-*.jsonl"))


def answer_files(answers: Path) -> list[Path]:
    """The answer files meant by `answers`: itself, or the finished ones of a folder.

    A folder's empty ones, whose answers were all dropped, are left out. Raises HeadsError if there
    are none.
    """
    paths = [path for path in chunk_paths(answers) if path.stat().st_size]
    if answers.is_file():
        paths = [answers]
    if not paths:
        raise HeadsError(
            f"answers: {answers}: found no answer file with anything in it; expected FILE.jsonl or "
            "a folder with answers-*.jsonl, as `bpd-train generate` writes them"
        )
    return paths


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write an answer file, whole or not at all."""
    partial = path.with_suffix(".partial")
    lines = (json.dumps(asdict(record)) + "\n" for record in records)
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def read_records(path: Path) -> list[Record]:
    """The answers of `path`; those without a token are left out, and the log says how many.

    Raises HeadsError naming file, line and field.
    """
    records, empty = [], 0
    for where, values in read_json_lines(path, "an answer file"):
        record = _record(values, where)
        if record.answer_token_ids:
            records.append(record)
        else:
            empty += 1
    if not records:
        raise HeadsError(f"{path}: no answers found; expected one object a line")
    if empty:
        logger.warning("%s: %d answers without a token left out", path, empty)
    return records


def _record(values: dict[str, Any], where: str) -> Record:
    for name in ("prompt_token_ids", "answer_token_ids"):
        ids = values.get(name)
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise HeadsError(f"{where}: {name}: expected a list of token ids; generate it anew")
    if not values["prompt_token_ids"]:
        raise HeadsError(f"{where}: prompt_token_ids: found none; expected at least one token")
    return Record(
        values["prompt_token_ids"],
        values["answer_token_ids"],
        str(values.get("finish_reason", "unknown")),
        str(values.get("source", "unknown")),
    )
