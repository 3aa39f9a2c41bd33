"""Which rows or answers each optimiser step trains on, and the batch that the model gets.

A batch follows from the seed and the step alone, so a run can stop and go on anywhere. With N
processes, or in N parts, each slot takes every Nth unit of the step's batch; losses are divided
by what the whole batch holds, so that the step is the same one, up to rounding, for any N.

Shape suffixes: U units (rows or answers), R rows of a slot, B answers of a slot, L their longest,
T rows of all texts, K heads, S labels a row, D hidden size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from heads_training.dataset import IGNORED, Texts
from heads_training.losses import SoftLabels, sparse_targets
from heads_training.packing import pack
from heads_training.train_config import TrainConfig
from vllm_bpd.errors import HeadsError

P1 = -1  # the target's own prediction among the heads; it is trained in finetune mode only
_SEED_STRIDE = 1_000_003  # seeds of one run's steps and epochs stay apart from another's


class Order:
    """Units in an order drawn from (seed, epoch), cut into batches; those without labels left out.

    An epoch passes once over the units, but for a rest that fills no batch.
    """

    def __init__(self, units_U: Tensor, labelled_U: Tensor, size: int, seed: int) -> None:
        """`labelled_U` (bool) says which units have any label; `size` is a batch's.

        Raises HeadsError if none has.
        """
        if not labelled_U.any():
            raise HeadsError(
                "training: no row has a label; answers need at least two tokens, and the draft "
                "vocabulary some of them"
            )
        self.units_U, self.labelled_U, self.seed = units_U, labelled_U, seed
        self.size = min(size, len(units_U))
        self._ends: list[int] = []  # steps up to each epoch's end
        self._places: list[list[int]] = []  # by epoch, the places of its batches with labels
        self._epoch, self._batches_PU = -1, units_U.new_empty(0, self.size)

    def batch(self, step: int) -> Tensor:
        """[size] int64: the units of `step`."""
        epoch, number = self._find(step)
        if epoch != self._epoch:
            self._epoch, self._batches_PU = epoch, self._draw(epoch)
        return self.units_U[self._batches_PU[self._places[epoch][number]]]

    def skipped(self, steps: int) -> int:
        """How many batches without labels were passed over to find those of `steps` steps."""
        if steps < 1:
            return 0
        epoch, number = self._find(steps - 1)
        count = len(self.units_U) // self.size
        before = sum(count - len(places) for places in self._places[:epoch])
        return before + self._places[epoch][number] - number

    def _find(self, step: int) -> tuple[int, int]:
        """The epoch of `step`, and its number among the epoch's batches with labels."""
        while not self._ends or step >= self._ends[-1]:
            batches_PU = self._draw(len(self._ends))
            places = self.labelled_U[batches_PU].any(1).nonzero().flatten().tolist()
            self._ends.append((self._ends[-1] if self._ends else 0) + len(places))
            self._places.append(places)
        epoch = next(i for i, end in enumerate(self._ends) if step < end)
        return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def _draw(self, epoch: int) -> Tensor:
        """[P, size]: all the epoch's batches, of places in `units_U`."""
        generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + epoch)
        order_U = torch.randperm(len(self.units_U), generator=generator)
        count = len(order_U) // self.size
        return order_U[: count * self.size].view(count, self.size)


@dataclass(frozen=True)
class Labels:
    """What every head is trained towards, at every row."""

    texts: Texts
    labels_TK: Tensor  # int64, as rows of the scored vocabulary; IGNORED without one
    soft: SoftLabels | None
    config: TrainConfig

    def of(self, head: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights [R, S] of `head`; P1 has the texts' own tokens, and never soft labels."""
        if head == P1:
            ids_R1 = self.texts.sampled_T[rows_R].unsqueeze(1)
            return ids_R1, torch.ones_like(ids_R1, dtype=torch.float32)
        return sparse_targets(self.labels_TK, self.soft, rows_R, head, self.config.distillation)

    def count(self, head: int, rows_R: Tensor) -> int:
        """How many of the rows have a label for `head`."""
        return (
            len(rows_R)
            if head == P1
            else int((self.labels_TK[rows_R, head] != IGNORED).sum().item())
        )

    def shares(self, step: int, rows_R: Tensor) -> dict[int, tuple[float, float]]:
        """The heads trained at `step`: the share of rows, and the factor of the loss, of each.

        `rows_R` are the whole batch's. A head drawn at random is one that has labels in it.
        """
        heads = list(range(self.labels_TK.shape[1]))
        if self.config.mode == "finetune":
            heads.insert(0, P1)
        if self.config.head_loss == "mean":
            return {head: (1.0, 1 / len(heads)) for head in heads}
        if self.config.head_loss == "random":
            able = [head for head in heads if self.count(head, rows_R)]
            draw = random.Random(self.config.seed * _SEED_STRIDE + step)
            return {draw.choice(able): (1.0, 1.0)}
        # A later head's draft counts only behind accepted ones. Frozen heads see fewer rows: the
        # same as weights that decay, at a smaller cost.
        decays = {head: self.config.head_decay**i for i, head in enumerate(heads)}
        frozen = self.config.mode == "frozen"
        return {head: (decay if frozen else 1.0, decay) for head, decay in decays.items()}


class Steps(Dataset[dict[str, Any]]):
    """Batches of a run, one for each step, part and process; item i is for the slot's ith part."""

    def __init__(self, labels: Labels, order: Order, rank: int, world: int) -> None:
        """For process `rank` of `world`. Raises HeadsError if a slot would get nothing."""
        self.labels, self.order, self.config = labels, order, labels.config
        self.rank, self.world = rank, world
        self.parts = self.config.gradient_accumulation
        if order.size < world * self.parts:
            name = "batch_size" if self.config.mode == "frozen" else "batch_texts"
            raise HeadsError(
                f"{name}: found {order.size} a step; expected at least one for each of {world} "
                f"processes times {self.parts} parts (gradient_accumulation)"
            )

    def __len__(self) -> int:
        return self.config.steps * self.parts

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < len(self):
            raise IndexError(item)
        step, part = divmod(item, self.parts)
        return self.slot(step, self.rank + part * self.world, self.world * self.parts)

    def slot(self, step: int, slot: int, slots: int) -> dict[str, Any]:
        """The batch of one slot; subclasses make it."""
        raise NotImplementedError

    def rows(self, step: int) -> Tensor:
        """[R] int64: all rows of the step's whole batch."""
        raise NotImplementedError

    def describe(self, step: int) -> str:
        """The texts and rows of the step's batch, for messages."""
        rows_R, texts = self.rows(step), self.labels.texts
        records = texts.record_T[rows_R].unique().tolist()
        sources = sorted({texts.sources[record] for record in records})
        damaged_R = rows_R[~texts.gather(rows_R).isfinite().all(1)]
        text = f"{len(rows_R)} rows of {_some(records, 'answer')} (from {_some(sources, 'source')})"
        if len(damaged_R):
            found = texts.record_T[damaged_R].unique().tolist()
            text += f"; states of {_some(found, 'answer')} are themselves not finite"
        return text


class FrozenSteps(Steps):
    """Rows of cached states."""

    def rows(self, step: int) -> Tensor:
        """As `Steps.rows`."""
        return self.order.batch(step)

    def slot(self, step: int, slot: int, slots: int) -> dict[str, Any]:
        """Arguments of `FrozenObjective`."""
        rows_R, targets = self.rows(step), {}
        for head, (share, factor) in self.labels.shares(step, rows_R).items():
            taken_R = rows_R[: max(round(share * len(rows_R)), 1)]
            ids_RS, weights_RS = self.labels.of(head, taken_R[slot::slots])
            scale = factor * self.world / max(self.labels.count(head, taken_R), 1)
            targets[head] = (ids_RS, weights_RS * scale)
        own_R = rows_R[slot::slots]
        return {
            "hidden_RD": self.labels.texts.gather(own_R),
            "sampled_R": self.labels.texts.sampled_T[own_R],
            "targets": targets,
        }


class TunedSteps(Steps):
    """Whole prompts and answers, whose states the model under training makes."""

    def kept(self, record: int) -> tuple[Tensor, Tensor]:
        """The tokens to run, and the rows of `record` that they reach."""
        texts = self.labels.texts
        ids, length = texts.ids[record], int(texts.answer_lengths_R[record])
        prompt = len(ids) - length
        run = min(len(ids) - 1, self.config.max_tokens)  # the last token's own state is not needed
        first = int(texts.first_rows[record])
        return ids[:run].long(), torch.arange(first, first + max(run - prompt + 1, 0))

    def rows(self, step: int) -> Tensor:
        """As `Steps.rows`."""
        return torch.cat([self.kept(record)[1] for record in self.order.batch(step).tolist()])

    def slot(self, step: int, slot: int, slots: int) -> dict[str, Any]:
        """Arguments of `TunedObjective`."""
        # Slots get answers of all lengths, so that none waits long for another.
        records = sorted(
            self.order.batch(step).tolist(), key=lambda r: -len(self.labels.texts.ids[r])
        )
        batch, rows_R = self.texts_batch(records[slot::slots])
        whole_R, targets = self.rows(step), {}
        for head, (_, factor) in self.labels.shares(step, whole_R).items():
            ids_RS, weights_RS = self.labels.of(head, rows_R)
            scale = factor * self.world / max(self.labels.count(head, whole_R), 1)
            targets[head] = (ids_RS, weights_RS * scale)
        return {**batch, "targets": targets}

    def texts_batch(self, records: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        """What the model runs for `records`, and the rows [R] of the texts whose states it makes.

        Packed, a row holds several texts and attention stops at their borders. Otherwise a text has
        a row of its own, padded at its end, where causal attention never looks.
        """
        kept = [self.kept(record) for record in records]
        longest = max(len(ids) for ids, _ in kept)
        capacity = max(self.config.max_tokens, longest) if self.config.packing else longest
        packed = pack([ids.tolist() for ids, _ in kept], capacity, self.config.packing)
        width, places = packed.input_ids_BL.shape[1], []
        for (row, first), (ids, rows_R) in zip(packed.places, kept, strict=True):
            end = row * width + first + len(ids)
            places.append(torch.arange(end - len(rows_R), end))
        all_R = torch.cat([rows_R for _, rows_R in kept])
        return {
            "ids_BL": packed.input_ids_BL,
            "positions_BL": packed.position_ids_BL,
            "places_R": torch.cat(places),
            "sampled_R": self.labels.texts.sampled_T[all_R],
        }, all_R


def _some(values: list[Any], name: str) -> str:
    """The first few of many, with the name of what they are."""
    shown = ", ".join(str(value) for value in values[:5])
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    return f"{name}{'s' if len(values) > 1 else ''} {shown}{more}"
