"""The target's last hidden states under its answers, written to disk as memory-mapped shards.

From the hidden state at position t the target samples token t + 1. For a prompt of P tokens and
an answer of A tokens the shards keep t = P-1 .. P+A-2: the states that answer tokens came from.

On request also those under the prompts, which the same pass makes. A prompt is then one more
record: what every prompt of the file begins with stands for its prompt, the rest for its answer.

One safetensors file for one answer file: `hidden` [T, D] bf16, `token_ids` [N] int32 (each text's
prompt and answer, one after the other), `prompt_lengths` [R] and `answer_lengths` [R] int32,
`of_prompt` [R] bool; its metadata holds the sources, the finish reasons and what the shard was
made from.

Shape suffixes: R records, N their tokens, T their answer tokens, B texts of a batch, L longest
of them, D hidden size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads_training.records import Record, answer_files, read_records
from heads_training.target import last_hidden_state, load_model, resolve_target, weights_digest
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import read_fingerprint

logger = logging.getLogger(__name__)

# Padded tokens a forward pass; more does not make two cores faster, and nor does packing: sorted by
# length, texts waste little (docs/training-data.md has the figures).
BATCH_TOKENS = 4096
_TENSORS = ("hidden", "token_ids", "prompt_lengths", "answer_lengths", "of_prompt")


@dataclass(frozen=True)
class Shard:
    """The hidden states under the answers of one file; tensors are mapped, not read."""

    hidden_TD: Tensor  # bf16
    token_ids_N: Tensor  # int32
    prompt_lengths_R: Tensor  # int32, tokens
    answer_lengths_R: Tensor  # int32, tokens
    of_prompt_R: Tensor  # bool: another record's prompt; these come behind all answers
    sources: list[str]  # one a record
    finish_reasons: list[str]  # one a record


def write_states(target: str, answers: Path, states: Path, prompts: bool = False) -> list[Path]:
    """One shard in `states` for each answer file; shards that are up to date are kept.

    With `prompts`, the states under them as well; a shard that has more than is asked for is kept.
    Returns the shards' paths, in the answer files' order. Raises HeadsError for bad input.
    """
    from tqdm import tqdm

    folder = resolve_target(target)
    fingerprint, weights = read_fingerprint(folder), weights_digest(folder)
    states.mkdir(parents=True, exist_ok=True)
    todo, shards = [], []
    for path in answer_files(answers):
        made_from = {
            "answers_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "target": json.dumps(fingerprint.__dict__, sort_keys=True),
            "weights": weights,
            "prompts": str(prompts),
        }
        shards.append(states / f"{path.stem}.safetensors")
        if not _is_current(shards[-1], made_from):
            todo.append((path, shards[-1], made_from))
    if not todo:
        return shards
    model = load_model(target)
    begin, tokens = time.monotonic(), 0
    for path, shard_path, made_from in tqdm(todo, unit="file", desc="hidden states"):
        shard = _make_shard(model, path, fingerprint.vocab_size, prompts)
        _write_shard(shard_path, shard, made_from)
        tokens += len(shard.token_ids_N)
    speed = tokens / (time.monotonic() - begin)
    logger.info("hidden states: %d tokens, %.0f tokens/s", tokens, speed)
    return shards


def iterate_states(target: str, answers: Path, prompts: bool = False) -> Iterator[Shard]:
    """The shards that `write_states` would write, one after the other and never on disk.

    For short runs and small disks: every pass over them runs the target again. One shard at a time
    is held. Raises HeadsError for bad input.
    """
    vocab_size = read_fingerprint(resolve_target(target)).vocab_size
    files = answer_files(answers)
    model = load_model(target)
    for path in files:
        yield _make_shard(model, path, vocab_size, prompts)


def _make_shard(model: Any, answers: Path, vocab_size: int, prompts: bool) -> Shard:
    """The hidden states under the answers of one file, and under its prompts."""
    records = read_records(answers)
    _check_ids(records, vocab_size, answers)
    read = prompt_texts(records) if prompts else {}
    texts = records + list(read.values())
    ids = [i for text in texts for i in text.prompt_token_ids + text.answer_token_ids]
    return Shard(
        hidden_states(model, records, read),
        torch.tensor(ids, dtype=torch.int32),
        _lengths([text.prompt_token_ids for text in texts]),
        _lengths([text.answer_token_ids for text in texts]),
        torch.arange(len(texts)) >= len(records),
        [text.source for text in texts],
        [text.finish_reason for text in texts],
    )


def prompt_texts(records: list[Record]) -> dict[int, Record]:
    """Prompts as texts of their own, by the index of their record.

    What all prompts begin with, a chat template's head, counts for nothing. Nor does a prompt with
    fewer than two tokens behind it: heads draft from the second on.
    """
    prompts = [record.prompt_token_ids for record in records]
    pairs = zip(min(prompts), max(prompts), strict=False)  # what these share, all do
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    texts = {}
    for i, record in enumerate(records):
        begin = min(max(shared, 1), len(record.prompt_token_ids))
        first, rest = record.prompt_token_ids[:begin], record.prompt_token_ids[begin:]
        if len(rest) > 1:
            texts[i] = replace(
                record, prompt_token_ids=first, answer_token_ids=rest, finish_reason="given"
            )
    return texts


def hidden_states(
    model: Any, records: list[Record], prompts: dict[int, Record] | None = None
) -> Tensor:
    """[T, D] bf16: the states under every record's answer tokens, records one after the other.

    Then those under `prompts`, which `prompt_texts` gives.
    """
    texts = [(i, record) for i, record in enumerate(records)] + list((prompts or {}).items())
    places: list[list[tuple[int, int, int]]] = [[] for _ in records]  # from, to, how many
    total = 0
    for i, text in texts:
        count = len(text.answer_token_ids)
        places[i].append((len(text.prompt_token_ids) - 1, total, count))
        total += count
    hidden_TD = torch.empty(total, model.config.get_text_config().hidden_size, dtype=torch.bfloat16)
    for batch in _batches(records):
        ids_BL = _padded([records[i] for i in batch])
        hidden_BLD = last_hidden_state(model, ids_BL)
        for row, i in enumerate(batch):
            for first, begin, count in places[i]:
                hidden_TD[begin : begin + count] = hidden_BLD[row, first : first + count]
    return hidden_TD


def _batches(records: list[Record]) -> Iterator[list[int]]:
    """Indices of records of like length, at most `BATCH_TOKENS` padded tokens together."""
    order = sorted(range(len(records)), key=lambda i: -_length(records[i]))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * _length(records[batch[0]]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _length(record: Record) -> int:
    """Tokens to run: the last answer token's own state is never needed."""
    return len(record.prompt_token_ids) + len(record.answer_token_ids) - 1


def _padded(records: list[Record]) -> Tensor:
    """[B, L] int64, padded at the end with id 0, which nothing reads."""
    longest = max(_length(record) for record in records)
    ids_BL = torch.zeros(len(records), longest, dtype=torch.int64)
    for row, record in enumerate(records):
        ids = (record.prompt_token_ids + record.answer_token_ids)[:-1]
        ids_BL[row, : len(ids)] = torch.tensor(ids)
    return ids_BL


def _check_ids(records: list[Record], vocab_size: int, path: Path) -> None:
    highest = max(max(r.prompt_token_ids + r.answer_token_ids) for r in records)
    if highest >= vocab_size:
        raise HeadsError(
            f"{path}: found token id {highest}; the target's vocabulary has {vocab_size} ids: "
            "these answers are another target's"
        )


def _write_shard(path: Path, shard: Shard, made_from: dict[str, str]) -> None:
    """Write whole or not at all."""
    tensors = {
        "hidden": shard.hidden_TD,
        "token_ids": shard.token_ids_N,
        "prompt_lengths": shard.prompt_lengths_R,
        "answer_lengths": shard.answer_lengths_R,
        "of_prompt": shard.of_prompt_R,
    }
    metadata = {
        **made_from,
        "sources": json.dumps(shard.sources),
        "finish_reasons": json.dumps(shard.finish_reasons),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)


def _lengths(texts: list[list[int]]) -> Tensor:
    return torch.tensor([len(ids) for ids in texts], dtype=torch.int32)


def _is_current(path: Path, made_from: dict[str, str]) -> bool:
    """Whether the shard is there and was made from the same answers by the same target."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):
        return False
    if metadata.get("prompts") == str(True):
        made_from = made_from | {"prompts": str(True)}  # has more than was asked for
    return all(metadata.get(name) == value for name, value in made_from.items())


def read_shard(path: Path) -> Shard:
    """Map one shard. Raises HeadsError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            hidden_TD, ids_N, prompts_R, answers_R, of_R = (file.get_tensor(n) for n in _TENSORS)
    except (SafetensorError, OSError) as error:
        raise HeadsError(
            f"{path}: not a readable shard ({error}); delete it to remake it"
        ) from None
    return Shard(
        hidden_TD,
        ids_N,
        prompts_R,
        answers_R,
        of_R,
        json.loads(metadata["sources"]),
        json.loads(metadata["finish_reasons"]),
    )
