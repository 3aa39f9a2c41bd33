"""Heads learn their own offset, overfit a few texts, and a run goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads_training import losses
from heads_training.dataset import IGNORED, Texts, label_text, to_draft_ids
from heads_training.hidden_states import write_states
from heads_training.target import TargetRows, read_rows
from heads_training.train import STATE_FILE, TrainConfig, Trainer, TrainingData, prepare, train
from vllm_bpd.config import TargetFingerprint
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import drafted_position

TINY = TrainConfig(
    num_draft_heads=3,
    head_hidden_size=64,
    draft_vocab_size=80,
    head_decay=1.0,
    steps=300,
    batch_size=64,
    learning_rate=4e-3,
    weight_decay=0.0,
    validation=0.3,
    validate_every=300,
    autocast=False,
)


def position_coded(num_heads: int) -> TrainingData:
    """One text whose token at position p is id p, and whose state at p is unit vector p."""
    size, prompt = 48, 5
    sampled_T, next_TK = label_text(torch.arange(prompt), torch.arange(prompt, size), num_heads)
    rows_T = torch.arange(len(sampled_T))
    hidden_TD = torch.eye(size)[prompt - 1 : size - 1].bfloat16()
    texts = Texts([hidden_TD], sampled_T, next_TK, rows_T * 0, [b""], ["made"], [False])
    fingerprint = TargetFingerprint("Made", 1, size, size)
    target = TargetRows(fingerprint, torch.zeros(size, size), torch.eye(size))
    return TrainingData(texts, rows_T, rows_T, None, next_TK, None, target, 1.0)


@pytest.mark.parametrize("head_loss", ["mean", "random"])
def test_each_head_learns_its_offset(head_loss: str) -> None:
    config = replace(TINY, draft_vocab_size=0, steps=150, conditioning="none", distillation=0.0)
    config = replace(config, head_loss=head_loss, learning_rate=1e-2)  # type: ignore[arg-type]
    data = position_coded(config.num_draft_heads)
    trainer = Trainer(config, data)
    while trainer.step < config.steps:
        trainer.train_step()
    position = 20
    state_BD = torch.eye(48)[position : position + 1]
    drafts = trainer.heads(state_BD)[0].argmax(-1).tolist()
    assert drafts == [drafted_position(position, head) for head in range(3)]
    assert drafts[0] == position + 2  # behind the token that the target samples itself
    assert trainer.validate(10**6) > 3.5  # of 4: the last steps run past the end


@pytest.fixture(scope="module")
def tiny_data(
    tiny_target: Path, tiny_answers: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingData:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path_factory.mktemp("states"))
    return prepare(TINY, shards, read_rows(str(tiny_target)))


def test_heads_overfit_a_few_texts(tiny_data: TrainingData) -> None:
    rows_T = torch.arange(tiny_data.texts.rows)
    everything = replace(tiny_data, train_T=rows_T, held_out_T=rows_T, draft_ids_V=None)
    everything = replace(everything, labels_TK=tiny_data.texts.next_TK, soft=None)
    config = replace(TINY, draft_vocab_size=0, batch_size=256, distillation=0.0)
    trainer = Trainer(config, everything)
    while trainer.step < config.steps:
        trainer.train_step()
    lengths = torch.bincount(tiny_data.texts.record_T)
    # Perfect heads take this many steps, the cut at each answer's end included.
    steps = int(((lengths - 1 + 3) // 4).sum())
    best = 1 + int((lengths - 1 - (lengths - 1) // 4).sum()) / steps
    assert best > 3.7
    assert trainer.validate(10**6) > best - 0.2


def test_the_target_speaks_first(tiny_data: TrainingData) -> None:
    heads = Trainer(TINY, tiny_data).heads
    state_BD = torch.randn(2, 64)
    assert torch.equal(heads(state_BD, state_BD), state_BD.unsqueeze(1).expand(2, 3, 64))


def test_later_heads_get_fewer_rows(tiny_data: TrainingData) -> None:
    assert Trainer(replace(TINY, head_decay=0.5), tiny_data).head_shares() == {
        0: 1,
        1: 0.5,
        2: 0.25,
    }
    trainer = Trainer(replace(TINY, head_loss="random"), tiny_data)
    drawn: list[int] = []
    for trainer.step in range(60):
        assert list(trainer.head_shares().values()) == [1.0]
        drawn += trainer.head_shares()
    assert {drawn.count(head) > 5 for head in range(3)} == {True}


def test_learning_rate_rises_then_falls(tiny_data: TrainingData) -> None:
    trainer = Trainer(replace(TINY, steps=100, warmup=0.1, learning_rate=1.0), tiny_data)
    rates = []
    for trainer.step in range(101):
        rates.append(trainer.learning_rate())
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0)


def test_a_run_goes_on_exactly(tiny_data: TrainingData, tmp_path: Path) -> None:
    config = replace(TINY, steps=12, validate_every=4)
    whole = train(config, tiny_data, tmp_path / "whole")
    stopped = Trainer(config, tiny_data)
    for _ in range(7):
        stopped.train_step()
    (tmp_path / "parts").mkdir()
    stopped.save(tmp_path / "parts" / STATE_FILE)
    parts = train(config, tiny_data, tmp_path / "parts")
    for name, value in whole.heads.state_dict().items():
        assert torch.equal(value, parts.heads.state_dict()[name]), name
    assert parts.validation_k_hat == whole.validation_k_hat


def test_another_run_is_refused(tiny_data: TrainingData, tmp_path: Path) -> None:
    path = tmp_path / STATE_FILE
    Trainer(TINY, tiny_data).save(path)
    with pytest.raises(HeadsError, match=r"learning_rate: found 0\.004, this run has 0\.001"):
        train(replace(TINY, learning_rate=1e-3), tiny_data, tmp_path)
    path.write_bytes(b"cut off")
    with pytest.raises(HeadsError, match="not a training state"):
        train(TINY, tiny_data, tmp_path)


def test_a_loss_that_is_not_finite_names_the_step(tiny_data: TrainingData) -> None:
    trainer = Trainer(TINY, tiny_data)
    trainer.train_step()
    with torch.no_grad():
        next(trainer.heads.parameters()).fill_(float("nan"))
    with pytest.raises(HeadsError, match="nan at step 1"):
        trainer.train_step()


def test_sparse_targets_and_loss(tiny_data: TrainingData) -> None:
    assert tiny_data.soft is not None
    rows_B = torch.arange(30)
    for head in range(3):
        ids_BS, weights_BS = losses.sparse_targets(
            tiny_data.labels_TK, tiny_data.soft, rows_B, head, 0.25
        )
        valid_B = tiny_data.labels_TK[rows_B, head] != IGNORED
        torch.testing.assert_close(weights_BS.sum(1), valid_B.float(), rtol=1e-3, atol=1e-3)
        # The target's most probable token of the drafted position is the one it said.
        said_B = tiny_data.labels_TK[rows_B[valid_B], head]
        assert (ids_BS[valid_B, 1] == said_B).float().mean() > 0.9
    logits_BV = torch.randn(30, 80)
    hard = losses.sparse_targets(tiny_data.labels_TK, None, rows_B, 0, 0.25)
    expected = torch.nn.functional.cross_entropy(
        logits_BV, tiny_data.labels_TK[rows_B, 0], ignore_index=IGNORED
    )
    torch.testing.assert_close(losses.sparse_cross_entropy(logits_BV, *hard), expected)


def test_draft_vocabulary_is_of_the_training_split(tiny_data: TrainingData) -> None:
    texts, ids_V = tiny_data.texts, tiny_data.draft_ids_V
    assert ids_V is not None
    assert len(ids_V) == 80
    seen = torch.unique(texts.sampled_T[tiny_data.train_T])
    assert torch.isin(seen, ids_V).all() or len(seen) > 80
    assert torch.equal(tiny_data.labels_TK, to_draft_ids(texts.next_TK, ids_V, 97))


@pytest.mark.parametrize(
    "values",
    [{"steps": 0}, {"distillation": 1.5}, {"learning_rate": 0.0}, {"head_loss": "all"}],
)
def test_impossible_options(values: dict[str, object]) -> None:
    with pytest.raises(HeadsError, match=next(iter(values))):
        replace(TINY, **values)  # type: ignore[arg-type]


def test_a_split_without_rows(tiny_target: Path, tiny_answers: Path, tmp_path: Path) -> None:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path)
    with pytest.raises(HeadsError, match="leaves none for validation"):
        prepare(replace(TINY, validation=0.0), shards, read_rows(str(tiny_target)))
