"""k-hat on held-out answers while training: the walk, split over the processes.

Frozen, the walk is exact: the answers are the target's own. In finetune the target changes, and
its new answers are not known without generating them; there a draft counts as accepted where it
is what the target, as it now is, would say behind the recorded text. Evaluating the written
checkpoint on answers of the new target gives the exact figure.

Shape suffixes: R rows of some answers, K heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heads_training.batches import TunedSteps
from heads_training.loop import HeadsTrainer
from heads_training.train import TrainingData
from heads_training.walk import WalkCounts, match_rows, walk
from vllm_bpd.heads import BlockwiseHeads

_NOTHING = -1  # matches no draft


def held_out_records(data: TrainingData, max_rows: int) -> list[int]:
    """The first held-out answers, whole, within `max_rows` rows together; the first always."""
    records_R = data.texts.record_T[data.held_out_T].unique_consecutive()
    ends_R = data.texts.answer_lengths_R[records_R].cumsum(0)
    kept: list[int] = records_R[: max(int((ends_R <= max_rows).sum()), 1)].tolist()
    return kept


def validate_frozen(trainer: HeadsTrainer, data: TrainingData) -> float:
    """Mean accepted block with all heads, in bf16 as they will be stored."""
    heads = BlockwiseHeads(trainer.objective.heads.config)
    heads.load_state_dict(trainer.whole_weights("heads."))
    heads.to(torch.bfloat16)
    texts, found = data.texts, []
    for record, counted in _share(trainer, held_out_records(data, trainer.config.validation_rows)):
        first, length = int(texts.first_rows[record]), int(texts.answer_lengths_R[record])
        if counted:
            found.append((torch.arange(first, first + length), length))
    counts = WalkCounts(0, [0] * heads.num_heads)
    if found:
        rows_R = torch.cat([rows_R for rows_R, _ in found])
        match_RK = match_rows(heads, texts, rows_R, data.target, data.draft_ids_V)
        counts = walk(match_RK, [length for _, length in found], heads.num_heads)
    return _reduced(trainer, counts)


def validate_tuned(trainer: HeadsTrainer, data: TrainingData) -> float:
    """As `validate_frozen`, against the choices of the target under training."""
    steps, model = trainer.steps, trainer.model_wrapped
    assert isinstance(steps, TunedSteps)
    heads = trainer.objective.heads.num_heads
    records = held_out_records(data, trainer.config.validation_rows)
    matches, lengths = [torch.zeros(0, heads, dtype=torch.bool)], []
    model.eval()
    for record, counted in _share(trainer, [r for r in records if len(steps.kept(r)[1])]):
        batch, rows_R = steps.texts_batch([record])
        with torch.no_grad():
            made = model(**trainer._prepare_inputs(batch))
        if counted:
            matches.append(agreement(made["drafts_RK"].cpu(), made["chosen_R"].cpu()))
            lengths.append(len(rows_R))
    model.train()
    return _reduced(trainer, walk(torch.cat(matches), lengths, heads))


def agreement(drafts_RK: Tensor, chosen_R: Tensor) -> Tensor:
    """[R, K] bool: whether each head's draft is what the target says at the row it is for.

    Takes one answer's rows: drafts, and the target's own most probable token at each.
    """
    count, heads = drafts_RK.shape
    padded = torch.cat([chosen_R, chosen_R.new_full((heads,), _NOTHING)])
    said_RK = torch.stack([padded[1 + i : 1 + i + count] for i in range(heads)], 1)
    return drafts_RK == said_RK


def _share(trainer: HeadsTrainer, records: list[int]) -> list[tuple[int, bool]]:
    """This process's records, and whether each counts; as many in every process.

    A sharded model runs in all processes at once, so one with fewer records repeats some.
    """
    rank, world = trainer.args.process_index, trainer.args.world_size
    places = [rank + i * world for i in range(math.ceil(len(records) / world))]
    return [(records[place % len(records)], place < len(records)) for place in places]


def _reduced(trainer: HeadsTrainer, counts: WalkCounts) -> float:
    """k-hat of all processes' counts together."""
    values = torch.tensor([counts.steps, *counts.accepted_at], device=trainer.args.device)
    steps, *accepted = trainer.accelerator.reduce(values, "sum").tolist()
    return WalkCounts(steps, accepted).k_hat
