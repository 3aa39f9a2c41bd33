"""Trains the heads on the frozen target's cached hidden states; writes the checkpoint.

Shape suffixes: T rows of all texts, B rows of a batch, K heads, V scored ids, W whole vocabulary,
D hidden size.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from heads_training import losses
from heads_training.dataset import (
    Texts,
    coverage,
    draft_vocabulary,
    read_texts,
    split_rows,
    to_draft_ids,
)
from heads_training.target import TargetRows
from heads_training.training_state import load_state, save_state
from heads_training.walk import frozen_rows, match_rows, walk
from vllm_bpd.config import Activation, Conditioning, HeadsConfig
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import BlockwiseHeads

logger = logging.getLogger(__name__)

STATE_FILE = "training.safetensors"
LOG_FILE = "train-log.jsonl"


@dataclass(frozen=True)
class TrainConfig:
    """How heads are shaped and trained."""

    num_draft_heads: Annotated[int, "extra heads, k - 1"] = 4
    head_hidden_size: Annotated[int, "hidden units for each head; the joint layer has all"] = 560
    activation: Annotated[Activation, "between the two layers"] = "silu"
    conditioning: Annotated[Conditioning, "what heads read beside the state"] = "sampled_token"
    draft_vocab_size: Annotated[int, "ids that heads score; 0: the whole vocabulary"] = 8192
    head_loss: Annotated[Literal["random", "mean"], "heads trained in one step"] = "mean"
    head_decay: Annotated[float, "rows a head trains on, relative to the head before, 0..1"] = 0.7
    distillation: Annotated[float, "share of the target's probabilities in the labels, 0..1"] = 0.5
    steps: Annotated[int, "optimiser steps"] = 4000
    batch_size: Annotated[int, "rows (answer tokens) a step"] = 1024
    learning_rate: Annotated[float, "peak of the cosine schedule"] = 2e-3
    warmup: Annotated[float, "share of the steps with a rising learning rate, 0..1"] = 0.05
    weight_decay: Annotated[float, "AdamW's"] = 0.01
    grad_clip: Annotated[float, "largest gradient norm"] = 1.0
    validation: Annotated[float, "share of the prompts held out, 0..1"] = 0.05
    validation_rows: Annotated[int, "rows at most, whole answers, for checks on the way"] = 16384
    validate_every: Annotated[int, "steps between validations; the state is saved then too"] = 500
    seed: Annotated[int, "draws weights, batches and heads"] = 0
    autocast: Annotated[bool, "matrix products in bf16; otherwise float32"] = True

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises HeadsError naming field, found and expected."""
        for name in ("steps", "batch_size", "validate_every", "validation_rows"):
            if getattr(self, name) < 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected at least 1")
        for name in ("head_decay", "distillation", "warmup", "validation"):
            if not 0 <= getattr(self, name) <= 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected 0 to 1")
        for name in ("learning_rate", "grad_clip"):
            if getattr(self, name) <= 0:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected more than 0")
        if self.draft_vocab_size < 0 or self.weight_decay < 0:
            raise HeadsError("draft_vocab_size, weight_decay: expected at least 0")
        if self.head_loss not in ("random", "mean"):
            raise HeadsError(f"head_loss: found {self.head_loss!r}; expected random or mean")


@dataclass(frozen=True)
class TrainingData:
    """All that steps read; nothing of it changes."""

    texts: Texts
    train_T: Tensor  # int64, training rows
    held_out_T: Tensor  # int64, validation rows, whole answers in order
    draft_ids_V: Tensor | None  # int64, the draft vocabulary; None: the whole vocabulary
    labels_TK: Tensor  # int64, as rows of the draft vocabulary
    soft: losses.SoftLabels | None
    target: TargetRows
    coverage: float  # share of validation tokens in the draft vocabulary, 0..1


@dataclass
class Trained:
    """Heads in float32, and how well they did."""

    heads: BlockwiseHeads
    validation_k_hat: float  # over the rows of `validation_rows`
    seconds: float  # of training in this run


def prepare(config: TrainConfig, shards: list[Path], target: TargetRows) -> TrainingData:
    """Read the shards, split by prompt, choose the draft vocabulary on the training split.

    Raises HeadsError if a split has no rows.
    """
    texts = read_texts(shards, config.num_draft_heads)
    if texts.hidden_TD[0].shape[1] != target.fingerprint.hidden_size:
        raise HeadsError(
            f"states: found width {texts.hidden_TD[0].shape[1]}; the target's hidden size is "
            f"{target.fingerprint.hidden_size}: these states are another target's"
        )
    train_T, held_out_T = split_rows(texts, config.validation)
    for name, rows_T in (("training", train_T), ("validation", held_out_T)):
        if not len(rows_T):
            raise HeadsError(
                f"validation: the share {config.validation} of {len(texts.prompts)} answers "
                f"leaves none for {name}; give more answers or another share"
            )
    ids_V = None
    if 0 < config.draft_vocab_size < target.fingerprint.vocab_size:
        vocab_size = target.fingerprint.vocab_size
        ids_V = draft_vocabulary(texts.sampled_T[train_T], config.draft_vocab_size, vocab_size)
    soft = None
    if config.distillation > 0:
        soft = losses.soft_labels(texts, frozen_rows(target, ids_V, torch.bfloat16)[1])
    return TrainingData(
        texts=texts,
        train_T=train_T,
        held_out_T=held_out_T,
        draft_ids_V=ids_V,
        labels_TK=to_draft_ids(texts.next_TK, ids_V, target.fingerprint.vocab_size),
        soft=soft,
        target=target,
        coverage=1.0 if ids_V is None else coverage(texts.sampled_T[held_out_T], ids_V),
    )


def heads_config(config: TrainConfig, data: TrainingData) -> HeadsConfig:
    """The checkpoint's config for these options and this target."""
    return HeadsConfig(
        num_draft_heads=config.num_draft_heads,
        head_hidden_size=config.head_hidden_size,
        target=data.target.fingerprint,
        activation=config.activation,
        conditioning=config.conditioning,
        draft_vocab_size=None if data.draft_ids_V is None else len(data.draft_ids_V),
    )


class Trainer:
    """One training run: heads, optimiser and step; everything random follows from seed and step."""

    def __init__(self, config: TrainConfig, data: TrainingData) -> None:
        """Start at step 0, with every head equal to the target's own prediction."""
        self.config, self.data, self.step = config, data, 0
        self.heads = BlockwiseHeads(heads_config(config, data))
        self.heads.reset_parameters(torch.Generator().manual_seed(config.seed))
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        dtype = torch.bfloat16 if config.autocast else torch.float32
        self.embedding_WD, self.head_VD = frozen_rows(data.target, data.draft_ids_V, dtype)
        self._order_epoch, self._order_T = -1, data.train_T

    def learning_rate(self) -> float:
        """Of the present step: linear warm-up, then cosine to zero."""
        warm = max(int(self.config.warmup * self.config.steps), 1)
        if self.step < warm:
            return self.config.learning_rate * (self.step + 1) / warm
        share = (self.step - warm) / max(self.config.steps - warm, 1)
        return self.config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def batch_rows(self) -> Tensor:
        """[B] the present step's rows: each epoch passes once over the training split."""
        size = min(self.config.batch_size, len(self.data.train_T))
        epoch, place = divmod(self.step, len(self.data.train_T) // size)
        if epoch != self._order_epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.data.train_T), generator=generator)
            self._order_epoch, self._order_T = epoch, self.data.train_T[order]
        return self._order_T[place * size : (place + 1) * size]

    def head_shares(self) -> dict[int, float]:
        """The heads trained at the present step, and the share of the batch each trains on.

        A later head's draft counts only behind accepted ones, so it gets `head_decay` times the
        rows of the head before: the same as weights that decay, at a smaller cost.
        """
        decays = [self.config.head_decay**i for i in range(self.config.num_draft_heads)]
        if self.config.head_loss == "random":
            seed = self.config.seed * 1_000_003 + self.step
            return {random.Random(seed).choices(range(len(decays)), decays)[0]: 1.0}
        return dict(enumerate(decays))

    def train_step(self) -> float:
        """One optimiser step; its loss. Raises HeadsError naming the step if it is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self._loss(self.batch_rows())
        value = float(loss.detach())
        if not math.isfinite(value):
            raise HeadsError(
                f"training: found loss {value} at step {self.step}; expected a finite one; lower "
                "--learning-rate, or look for damaged states"
            )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.step += 1
        return value

    def _loss(self, rows_B: Tensor) -> Tensor:
        data, dtype = self.data, self.head_VD.dtype
        hidden_BD = data.texts.gather(rows_B).to(dtype)
        conditioned = self.config.conditioning == "sampled_token"
        embedding_BD = self.embedding_WD[data.texts.sampled_T[rows_B]] if conditioned else None
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.autocast):
            states_BKD = self.heads(hidden_BD, embedding_BD)
            total: Tensor = states_BKD.new_zeros((), dtype=torch.float32)
            for head, share in self.head_shares().items():
                rows = max(round(share * len(rows_B)), 1)
                ids_BS, weights_BS = losses.sparse_targets(
                    data.labels_TK, data.soft, rows_B[:rows], head, self.config.distillation
                )
                logits_BV = states_BKD[:rows, head] @ self.head_VD.T
                total = total + share * losses.sparse_cross_entropy(logits_BV, ids_BS, weights_BS)
        return total

    def validate(self, max_rows: int) -> float:
        """k-hat of the walk, with all heads in bf16, over the first held-out answers.

        Takes whole answers, the first always, as long as their rows stay within `max_rows`.
        """
        texts, held_out_T = self.data.texts, self.data.held_out_T
        lengths = texts.record_T[held_out_T].unique_consecutive(return_counts=True)[1]
        count = max(int((lengths.cumsum(0) <= max_rows).sum()), 1)
        rows_T = held_out_T[: int(lengths[:count].sum())]
        match_TK = match_rows(
            self.bf16_heads(), texts, rows_T, self.data.target, self.data.draft_ids_V
        )
        return walk(match_TK, lengths[:count].tolist(), self.config.num_draft_heads).k_hat

    def bf16_heads(self) -> BlockwiseHeads:
        """A copy as it will be stored and served."""
        copy = BlockwiseHeads(self.heads.config)
        copy.load_state_dict(self.heads.state_dict())
        return copy.to(torch.bfloat16)

    def save(self, path: Path) -> None:
        """Write heads, optimiser and step, whole or not at all."""
        save_state(path, self.step, self.heads, self.optimizer, self._made_with())

    def load(self, path: Path) -> None:
        """Go on exactly where `save` stopped.

        Raises HeadsError if the file is damaged or was made with other options or data.
        """
        self.step = load_state(path, self.heads, self.optimizer, self._made_with())

    def _made_with(self) -> dict[str, Any]:
        rows = {
            "training rows": len(self.data.train_T),
            "target": str(self.data.target.fingerprint),
        }
        return {**asdict(self.config), **rows}


def train(config: TrainConfig, data: TrainingData, work: Path) -> Trained:
    """Train to the end, from the state saved in `work` if there is one; log to `work`.

    Raises HeadsError for a state that does not fit, or a loss that is not finite.
    """
    from tqdm import tqdm

    work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, data)
    if (work / STATE_FILE).exists():
        trainer.load(work / STATE_FILE)
        logger.info("%s: going on at step %d", work / STATE_FILE, trainer.step)
    begin, first, recent, k_hat = time.monotonic(), trainer.step, [0.0], 1.0
    with (
        tqdm(total=config.steps, initial=first, unit="step", desc="training") as bar,
        (work / LOG_FILE).open("a", encoding="utf-8") as log,
    ):
        while trainer.step < config.steps:
            recent.append(trainer.train_step())
            bar.update()
            if trainer.step % config.validate_every == 0 or trainer.step == config.steps:
                k_hat = trainer.validate(config.validation_rows)
                trainer.save(work / STATE_FILE)
                entry = {
                    "step": trainer.step,
                    "loss": round(sum(recent[1:]) / (len(recent) - 1), 4),
                    "validation_k_hat": round(k_hat, 4),
                    "seconds": round(time.monotonic() - begin, 1),
                }
                log.write(json.dumps(entry) + "\n")
                log.flush()
                bar.set_postfix(loss=entry["loss"], k_hat=entry["validation_k_hat"])
                recent = [0.0]
    if trainer.step == first:
        k_hat = trainer.validate(config.validation_rows)
    return Trained(trainer.heads, k_hat, time.monotonic() - begin)
