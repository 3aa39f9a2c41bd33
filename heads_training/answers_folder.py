"""What lies beside the answers: the settings they were made with, counts for each chunk, a summary.

`generate.json` holds the settings, the target's fingerprint and digests of prompt files, so that
answers of another model or to other prompts are never taken for this run's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads_training.degenerate import count_degenerate
from heads_training.records import chunk_paths, read_records
from heads_training.target import weights_digest
from vllm_bpd.errors import HeadsError, read_json
from vllm_bpd.fingerprint import read_fingerprint

SETTINGS_FILE = "generate.json"
SUMMARY_FILE = "summary.json"
_NAMES = ("target", "teacher")  # settings that tell a reader something, and are not compared


def describe_model(folder: Path) -> dict[str, Any]:
    """What tells this model from another: its fingerprint and a digest of its weight files.

    Raises HeadsError if `folder` is no model's.
    """
    return {**asdict(read_fingerprint(folder)), "weights": weights_digest(folder)}


def check_settings(folder: Path, settings: dict[str, Any], worker: int) -> None:
    """Write the settings beside the answers, or compare with those of the answers there.

    `worker` names a partial file of this process's own. Raises HeadsError if the settings differ:
    other settings deal other prompts to each chunk, or have them answered otherwise.
    """
    path = folder / SETTINGS_FILE
    settings = json.loads(json.dumps(settings))  # as it will be read again
    if not path.exists():
        if chunk_paths(folder):
            raise HeadsError(
                f"{path}: missing beside answers; expected the settings they were made with; use "
                "another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(path, settings, f".partial{worker}")
        return
    found = read_json(path, "the settings of answers; delete it, or use another folder")
    differing = [n for n in settings if n not in _NAMES and found.get(n) != settings[n]]
    if differing:
        name = differing[0]
        was = repr(found[name]) if name in found else "nothing"
        raise HeadsError(
            f"{path}: {name}: found {was}, this run has {settings[name]!r}; give the "
            "same options to go on, or another folder for the answers"
        )


def counts_path(chunk: Path) -> Path:
    """Where the counts of an answer file lie."""
    return chunk.with_suffix(".counts.json")


def write_counts(chunk: Path, counts: Counter[str]) -> None:
    """Keep the counts of a chunk; called before the chunk itself is there."""
    _write_json(counts_path(chunk), dict(counts), ".partial")


def count_chunks(chunks: Iterable[Path]) -> Counter[str]:
    """The counts of these answer files together; of one without, they are made anew.

    `answers` made; of these `empty`, `loop` and `cut` (`heads_training.degenerate`) and `dropped`;
    `answer_tokens` of those kept; prompts `too_long` to answer and `unusable` (the target failed to
    write them).
    """
    total: Counter[str] = Counter()
    for chunk in chunks:
        path = counts_path(chunk)
        if path.is_file():
            total.update(read_json(path, "counts of answers"))
        elif chunk.stat().st_size:
            total.update(count_degenerate(read_records(chunk)))
    return total


def summarise(folder: Path, worker: int) -> Counter[str]:
    """`count_chunks` of all of `folder`, written to `summary.json` too."""
    total = count_chunks(chunk_paths(folder))
    _write_json(folder / SUMMARY_FILE, dict(total), f".partial{worker}")
    return total


def summary_line(counts: Counter[str]) -> str:
    """The counts in words."""
    answers = max(counts["answers"], 1)
    parts = [f"{counts['answers']} answers, {counts['answer_tokens']} tokens of them kept"]
    for name, words in (("loop", "end in a loop"), ("cut", "are cut off at the token limit")):
        parts.append(f"{counts[name]} ({counts[name] / answers:.1%}) {words}")
    parts.append(f"{counts['empty']} are empty, {counts['dropped']} were dropped")
    parts.append(
        f"{counts['too_long']} prompts were too long and {counts['unusable']} of the target's own "
        "were unusable"
    )
    return "; ".join(parts)


def _write_json(path: Path, values: dict[str, Any], partial_suffix: str) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(partial_suffix)
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
