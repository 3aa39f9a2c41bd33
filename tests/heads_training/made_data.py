"""Training data made on the spot, whose answers are known, and small options for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from heads_training.dataset import Texts, label_text
from heads_training.target import TargetRows
from heads_training.train import TrainConfig, TrainingData
from vllm_bpd.config import TargetFingerprint

TINY = TrainConfig(
    num_draft_heads=3,
    head_hidden_size=64,
    draft_vocab_size=80,
    head_loss="mean",
    steps=300,
    batch_size=64,
    batch_texts=4,
    learning_rate=4e-3,
    base_learning_rate=1e-3,
    weight_decay=0.0,
    validation=0.3,
    validate_every=300,
    autocast=False,
)


class StopAt(TrainerCallback):
    """Ends a run early, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def made_texts(texts: list[tuple[Tensor, Tensor]], hidden_TD: Tensor, num_heads: int) -> Texts:
    """`Texts` of (prompt ids, answer ids), whose states are `hidden_TD`."""
    labelled = [label_text(prompt, answer, num_heads) for prompt, answer in texts]
    lengths_R = torch.tensor([len(answer) for _, answer in texts])
    return Texts(
        [hidden_TD.bfloat16()],
        torch.cat([sampled_T for sampled_T, _ in labelled]),
        torch.cat([next_TK for _, next_TK in labelled]),
        torch.arange(len(texts)).repeat_interleave(lengths_R),
        [str(i).encode() for i in range(len(texts))],
        [f"made:{i}" for i in range(len(texts))],
        [False] * len(texts),
        [torch.cat(pair).int() for pair in texts],
        lengths_R,
        torch.zeros(len(texts), dtype=torch.bool),
    )


def position_coded(num_heads: int) -> TrainingData:
    """One text whose token at position p is id p, and whose state at p is unit vector p."""
    size, prompt = 48, 5
    hidden_TD = torch.eye(size)[prompt - 1 : size - 1]
    texts = made_texts([(torch.arange(prompt), torch.arange(prompt, size))], hidden_TD, num_heads)
    rows_T = torch.arange(texts.rows)
    fingerprint = TargetFingerprint("Made", 1, size, size)
    target = TargetRows(fingerprint, torch.zeros(size, size), torch.eye(size))
    return TrainingData(texts, rows_T, rows_T, None, texts.next_TK, None, target, 1.0)
