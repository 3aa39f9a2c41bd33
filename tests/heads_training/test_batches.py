"""Batches follow from seed and step, and are the same for any number of processes or parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_training.batches import P1, Labels, Order
from heads_training.dataset import IGNORED
from heads_training.train import TrainingData, make_steps
from heads_training.train_config import HeadLoss, TrainConfig
from tests.heads_training.made_data import TINY
from vllm_bpd.errors import HeadsError

FINETUNE = replace(TINY, mode="finetune", tuned_target=Path("t"))


def test_an_epoch_passes_once_over_all() -> None:
    units_U = torch.arange(100, 120)
    order = Order(units_U, torch.ones(20, dtype=torch.bool), 5, seed=3)
    epochs = [torch.cat([order.batch(e * 4 + i) for i in range(4)]) for e in range(3)]
    assert all(torch.equal(epoch.sort().values, units_U) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    other = Order(units_U, torch.ones(20, dtype=torch.bool), 5, seed=3)
    assert torch.equal(other.batch(9), order.batch(9))  # asked first, the answer is the same
    assert order.skipped(12) == 0


def test_batches_without_labels_are_skipped_and_counted() -> None:
    units_U, labelled_U = torch.arange(12), torch.arange(12) < 3
    order = Order(units_U, labelled_U, 2, seed=0)
    plain = Order(units_U, torch.ones(12, dtype=torch.bool), 2, seed=0)
    every = [plain.batch(i) for i in range(60)]  # ten epochs of six batches
    kept = [i for i, batch_U in enumerate(every) if labelled_U[batch_U].any()]
    assert 10 < len(kept) < 40
    for step, place in enumerate(kept):
        assert torch.equal(order.batch(step), every[place])
        assert order.skipped(step + 1) == place - step
    with pytest.raises(HeadsError, match="no row has a label"):
        Order(units_U, labelled_U & False, 2, seed=0)


@pytest.mark.parametrize("config", [TINY, FINETUNE], ids=["frozen", "finetune"])
@pytest.mark.parametrize("head_loss", ["mean", "random", "weighted"])
def test_slots_make_up_the_whole_step(
    config: TrainConfig, head_loss: HeadLoss, tiny_data: TrainingData
) -> None:
    config = replace(config, head_loss=head_loss)
    whole = make_steps(config, tiny_data)
    parted = replace(config, gradient_accumulation=2)
    halves = [make_steps(parted, tiny_data, rank, 2) for rank in range(2)]
    for step in range(3):
        slots = [half[2 * step + part] for half in halves for part in range(2)]
        item = whole[step]
        assert all(slot["targets"].keys() == item["targets"].keys() for slot in slots)
        sampled_R = torch.cat([slot["sampled_R"] for slot in slots])
        assert torch.equal(sampled_R.sort().values, item["sampled_R"].sort().values)
        for head, (ids_RS, weights_RS) in item["targets"].items():
            # Gradients are the mean of two processes, whose weights are twice the whole's.
            parts = torch.cat([slot["targets"][head][1] for slot in slots]) / 2
            torch.testing.assert_close(parts.sum(), weights_RS.sum())
            ids = torch.cat([slot["targets"][head][0][:, 0] for slot in slots])
            assert torch.equal(ids.sort().values, ids_RS[:, 0].sort().values)


def test_each_loss_has_its_share(tiny_data: TrainingData) -> None:
    rows_R = torch.arange(20)

    def shares(step: int = 0, **values: Any) -> Any:
        config = replace(TINY, **values)
        labels = Labels(tiny_data.texts, tiny_data.labels_TK, None, config)
        return labels.shares(step, rows_R)

    tuned: dict[str, Any] = {"mode": "finetune", "tuned_target": Path("t")}
    assert shares() == {head: (1.0, pytest.approx(1 / 3)) for head in range(3)}
    assert shares(**tuned) == dict.fromkeys((P1, 0, 1, 2), (1.0, 0.25))
    weighted: dict[str, Any] = {"head_loss": "weighted", "head_decay": 0.5}
    assert shares(**weighted) == {0: (1, 1), 1: (0.5, 0.5), 2: (0.25, 0.25)}
    assert shares(**weighted, **tuned) == {P1: (1, 1), 0: (1, 0.5), 1: (1, 0.25), 2: (1, 0.125)}
    for options, heads in (({}, range(3)), (tuned, range(-1, 3))):
        drawn = [shares(step, head_loss="random", **options) for step in range(80)]
        assert all(list(one.values()) == [(1.0, 1.0)] for one in drawn)
        counts = [sum(head in one for one in drawn) for head in heads]
        assert sum(counts) == 80
        assert min(counts) > 8
    assert len({str(shares(step, head_loss="random", seed=step)) for step in range(20)}) == 3


def test_a_head_without_labels_is_not_drawn(tiny_data: TrainingData) -> None:
    labels_TK = tiny_data.labels_TK.clone()
    labels_TK[:, 1] = IGNORED
    labels = Labels(tiny_data.texts, labels_TK, None, replace(TINY, head_loss="random"))
    drawn = {head for step in range(40) for head in labels.shares(step, torch.arange(20))}
    assert drawn == {0, 2}


def test_finetune_cuts_long_texts(tiny_data: TrainingData) -> None:
    texts = tiny_data.texts
    steps = make_steps(replace(FINETUNE, max_tokens=10), tiny_data)
    for record in range(len(texts.ids)):
        ids, rows_R = steps.kept(record)  # type: ignore[attr-defined]
        prompt = len(texts.ids[record]) - int(texts.answer_lengths_R[record])
        assert len(ids) == 10
        assert rows_R.tolist() == list(range(int(texts.first_rows[record]), rows_R[-1] + 1))
        assert len(rows_R) == 10 - (prompt - 1)
        assert torch.equal(
            texts.ids[record][prompt : prompt + len(rows_R)], texts.sampled_T[rows_R].int()
        )


def test_too_many_processes(tiny_data: TrainingData) -> None:
    with pytest.raises(HeadsError, match="batch_texts: found 4 a step; expected at least one"):
        make_steps(replace(FINETUNE, gradient_accumulation=3), tiny_data, 0, 2)
