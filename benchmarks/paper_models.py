"""Base models for `benchmarks.paper_table`: a small decoder-only Llama trained to translate.

Shape suffixes: B sentences, L tokens.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper_task import EOS, Sentence, Task
from heads_training.records import Record, write_records

_IGNORED = -100  # transformers' label of a token that is not trained on
_BATCH = 32  # sentences a step
_PEAK_RATE = 2e-3
_DECODED_AT_ONCE = 512  # sentences
_LONGEST = 64  # tokens of a translation

Pair = tuple[list[int], list[int]]  # ids of source and target


def gold(task: Task, sentences: list[Sentence], seed: int) -> list[Pair]:
    """Each sentence with one translation drawn at random."""
    rng = random.Random(seed)
    return [(task.source(s), task.translate(s, rng)) for s in sentences]


def train_base(vocab_size: int, pairs: list[Pair], steps: int, folder: Path) -> None:
    """Train a base model on `pairs` from nothing, and write it to `folder` in float32."""
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, weight_decay=0.01)
    rng = random.Random(0)
    for step in tqdm(range(steps), desc=f"base {folder.name}", mininterval=10):
        rate = min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_RATE * rate
        ids_BL, labels_BL = _batch(rng.sample(pairs, _BATCH))
        loss = model(input_ids=ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)


def _batch(pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Ids and labels, int64, padded at the end, where causal attention never looks."""
    longest = max(len(source) + len(target) for source, target in pairs)
    ids_BL = torch.full((len(pairs), longest), EOS)
    labels_BL = torch.full((len(pairs), longest), _IGNORED)
    for row, (source, target) in enumerate(pairs):
        end = len(source) + len(target)
        ids_BL[row, :end] = torch.tensor(source + target)
        labels_BL[row, len(source) : end] = torch.tensor(target)
    return ids_BL, labels_BL


def translate(folder: Path, sources: list[list[int]]) -> list[list[int]]:
    """Greedy translations by the model in `folder`, in bf16 as its hidden states will be."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, source in enumerate(sources):
        by_length[len(source)].append(index)
    found: list[list[int]] = [[] for _ in sources]
    for indices in by_length.values():
        for start in range(0, len(indices), _DECODED_AT_ONCE):
            part = indices[start : start + _DECODED_AT_ONCE]
            for index, ids in zip(part, _greedy(model, [sources[i] for i in part]), strict=True):
                found[index] = ids
    return found


def _greedy(model: Any, sources: list[list[int]]) -> list[list[int]]:
    """Sources of one length, so that nothing is padded before them."""
    ids_BL = torch.tensor(sources)
    out_BL = model.generate(
        ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        max_new_tokens=_LONGEST,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    answers = out_BL[:, ids_BL.shape[1] :].tolist()
    return [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in answers]


def write_answers(path: Path, pairs: list[Pair]) -> None:
    """The pairs as `bpd-train` reads answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(
        path,
        (
            Record(source, target, "stop" if target[-1] == EOS else "length", "translation")
            for source, target in pairs
        ),
    )
