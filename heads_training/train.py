"""Trains heads on a target's answers: `prepare` once, `train`, and save what comes out.

Both run in one process, or in each of several that `torchrun` or Ray Train started.

Shape suffixes: T rows of all texts, R records, K heads, V scored ids, W whole vocabulary,
D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heads_training import losses
from heads_training.dataset import (
    IGNORED,
    Texts,
    coverage,
    draft_vocabulary,
    read_texts,
    split_rows,
    to_draft_ids,
)
from heads_training.hidden_states import Shard
from heads_training.target import TargetRows
from heads_training.train_config import TrainConfig
from heads_training.walk import frozen_rows
from vllm_bpd.config import HeadsConfig
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import BlockwiseHeads

if TYPE_CHECKING:
    from heads_training.batches import Steps
    from heads_training.loop import HeadsTrainer

__all__ = [
    "TrainConfig",
    "Trained",
    "TrainingData",
    "heads_config",
    "made_with",
    "prepare",
    "train",
]

logger = logging.getLogger(__name__)


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

    heads: BlockwiseHeads  # of `target`
    target: TargetRows  # the data's when frozen; finetune: the new one
    validation_k_hat: float  # over the rows of `validation_rows`
    seconds: float  # of training, runs that this one went on from included
    skipped_batches: int  # passed over since no row had a label


def prepare(
    config: TrainConfig, shards: Sequence[Path | Shard], target: TargetRows
) -> TrainingData:
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
    if not config.reads_prompts:  # states may hold them all the same
        train_T = train_T[~texts.of_prompt_R[texts.record_T[train_T]]]
    for name, rows_T in (("training", train_T), ("validation", held_out_T)):
        if not len(rows_T):
            raise HeadsError(
                f"validation: the share {config.validation} of {texts.answers} answers "
                f"leaves none for {name}; give more answers or another share"
            )
    ids_V = None
    if 0 < config.draft_vocab_size < target.fingerprint.vocab_size:
        vocab_size = target.fingerprint.vocab_size
        ids_V = draft_vocabulary(texts.sampled_T[train_T], config.draft_vocab_size, vocab_size)
    soft = None
    if config.distillation > 0:
        head_VD = frozen_rows(target, ids_V, torch.bfloat16)[1]
        soft = losses.soft_labels(texts, head_VD.cuda() if torch.cuda.is_available() else head_VD)
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


def new_heads(config: TrainConfig, data: TrainingData) -> BlockwiseHeads:
    """Heads at step 0, every one equal to the target's own prediction."""
    heads = BlockwiseHeads(heads_config(config, data))
    heads.reset_parameters(torch.Generator().manual_seed(config.seed))
    return heads


def make_steps(config: TrainConfig, data: TrainingData, rank: int = 0, world: int = 1) -> Steps:
    """The batches of process `rank` of `world`. Raises HeadsError if there are none."""
    from heads_training.batches import FrozenSteps, Labels, Order, TunedSteps

    labels = Labels(data.texts, data.labels_TK, data.soft, config)
    if config.mode == "frozen":
        labelled_T = (data.labels_TK[data.train_T] != IGNORED).any(1)
        order = Order(data.train_T, labelled_T, config.batch_size, config.seed)
        return FrozenSteps(labels, order, rank, world)
    records_R = data.texts.record_T[data.train_T].unique()
    # The target itself has a label at every row, so a text has some unless none of it is reached.
    prompts_R = torch.tensor([len(ids) for ids in data.texts.ids]) - data.texts.answer_lengths_R
    labelled_R = prompts_R[records_R] <= config.max_tokens
    order = Order(records_R, labelled_R, config.batch_texts, config.seed)
    return TunedSteps(labels, order, rank, world)


def make_trainer(config: TrainConfig, data: TrainingData, work: Path) -> HeadsTrainer:
    """The run of these options, at step 0. Raises HeadsError for options that cannot be."""
    from heads_training.loop import HeadsTrainer
    from heads_training.objectives import FrozenObjective
    from heads_training.validation import validate_frozen

    work.mkdir(parents=True, exist_ok=True)
    heads = new_heads(config, data)
    if config.mode == "frozen":
        dtype = torch.bfloat16 if config.autocast else torch.float32
        matrices = frozen_rows(data.target, data.draft_ids_V, dtype)
        objective: Any = FrozenObjective(heads, *matrices, config.logits_chunk)
        validate: Any = validate_frozen
    else:
        from heads_training.finetune import make_objective
        from heads_training.validation import validate_tuned

        objective = make_objective(config, data, heads)
        validate = validate_tuned
    return HeadsTrainer(
        config,
        objective,
        lambda rank, world: make_steps(config, data, rank, world),
        lambda trainer: validate(trainer, data),
        made_with(config, data),
        work,
    )


def train(config: TrainConfig, data: TrainingData, work: Path) -> Trained:
    """Train to the end, from the state saved in `work` if there is one; log to `work`.

    Finetune writes the new target to `config.tuned_target`. Raises HeadsError for a state or
    folder that does not fit, or a loss that is not finite.
    """
    if config.tuned_target is not None:
        from heads_training.finetune import require_replaceable

        require_replaceable(config.tuned_target)  # now, not after hours of training
    trainer = make_trainer(config, data, work)
    trainer.run()
    heads, target = new_heads(config, data), data.target
    heads.load_state_dict(trainer.whole_weights("heads."))
    if config.tuned_target is not None:
        from heads_training.finetune import write_target

        heads, target = write_target(trainer, data, heads, config.tuned_target)
    return Trained(
        heads,
        target,
        trainer.k_hat,
        trainer.seconds,
        trainer.steps.order.skipped(config.steps),
    )


def made_with(config: TrainConfig, data: TrainingData) -> dict[str, Any]:
    """What a saved state must share with the run that goes on from it."""
    return {
        **config.made_with(),
        "training rows": len(data.train_T),
        "answers": data.texts.digest(),
        "target": str(data.target.fingerprint),
    }
