"""Heads learn their own offset, overfit a few texts, and a run goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads_training.dataset import to_draft_ids
from heads_training.hidden_states import write_states
from heads_training.target import read_rows
from heads_training.train import (
    TrainingData,
    made_with,
    make_trainer,
    new_heads,
    prepare,
    train,
)
from heads_training.train_config import HeadLoss, Mode
from heads_training.training_state import STATE_FILE, read_state
from tests.heads_training.made_data import TINY, StopAt, position_coded
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import drafted_position

SHORT = replace(TINY, steps=12, validate_every=4)


@pytest.mark.parametrize("head_loss", ["mean", "random", "weighted"])
def test_each_head_learns_its_offset(head_loss: HeadLoss, tmp_path: Path) -> None:
    config = replace(TINY, draft_vocab_size=0, steps=150, conditioning="none", distillation=0.0)
    config = replace(config, head_loss=head_loss, learning_rate=1e-2)
    trained = train(config, position_coded(config.num_draft_heads), tmp_path)
    position = 20
    state_BD = torch.eye(48)[position : position + 1]
    drafts = trained.heads(state_BD)[0].argmax(-1).tolist()
    assert drafts == [drafted_position(position, head) for head in range(3)]
    assert drafts[0] == position + 2  # behind the token that the target samples itself
    assert trained.validation_k_hat > 3.5  # of 4: the last steps run past the end


def test_heads_overfit_a_few_texts(tiny_data: TrainingData, tmp_path: Path) -> None:
    rows_T = torch.arange(tiny_data.texts.rows)
    everything = replace(tiny_data, train_T=rows_T, held_out_T=rows_T, draft_ids_V=None)
    everything = replace(everything, labels_TK=tiny_data.texts.next_TK, soft=None)
    config = replace(TINY, draft_vocab_size=0, batch_size=256, distillation=0.0)
    trained = train(config, everything, tmp_path)
    lengths = tiny_data.texts.answer_lengths_R
    # Perfect heads take this many steps, the cut at each answer's end included.
    steps = int(((lengths - 1 + 3) // 4).sum())
    best = 1 + int((lengths - 1 - (lengths - 1) // 4).sum()) / steps
    assert best > 3.7
    assert trained.validation_k_hat > best - 0.2


def test_rows_under_prompts_are_trained_on_or_not(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path, True)
    target = read_rows(str(tiny_target))
    data = prepare(TINY, shards, target)
    prompts_T = data.texts.of_prompt_R[data.texts.record_T[data.train_T]]
    assert prompts_T.any()
    assert not data.texts.of_prompt_R[data.texts.record_T[data.held_out_T]].any()
    tuned: dict[str, Any] = {"mode": "finetune", "tuned_target": tmp_path / "tuned"}
    without: tuple[dict[str, Any], ...] = ({"prompt_rows": False}, tuned)
    for changes in without:
        other = prepare(replace(TINY, **changes), shards, target)
        assert other.train_T.tolist() == data.train_T[~prompts_T].tolist()


def test_the_target_speaks_first(tiny_data: TrainingData) -> None:
    heads = new_heads(TINY, tiny_data)
    state_BD = torch.randn(2, 64)
    assert torch.equal(heads(state_BD, state_BD), state_BD.unsqueeze(1).expand(2, 3, 64))


@pytest.mark.parametrize("mode", ["frozen", "finetune"])
def test_a_run_goes_on_exactly(mode: Mode, tiny_data: TrainingData, tmp_path: Path) -> None:
    """Ten and ten steps are twenty. In two processes: test_distributed.py."""
    folder = tmp_path / "tuned" if mode == "finetune" else None
    config = replace(
        TINY, mode=mode, tuned_target=folder, head_loss="random", steps=20, validate_every=10
    )
    whole = train(config, tiny_data, tmp_path / "whole")
    stopped = make_trainer(config, tiny_data, tmp_path / "parts")
    stopped.add_callback(StopAt(10))
    stopped.run()
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint-*")] == ["checkpoint-10"]
    parts = train(config, tiny_data, tmp_path / "parts")
    assert parts.validation_k_hat == whole.validation_k_hat
    states = [
        load_file(tmp_path / name / "checkpoint-20" / STATE_FILE) for name in ("whole", "parts")
    ]
    assert states[0].keys() == states[1].keys()
    assert {name.partition(".")[0] for name in states[0]} == {"model", "optimizer"}
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_a_finished_run_is_not_trained_again(tiny_data: TrainingData, tmp_path: Path) -> None:
    first = train(SHORT, tiny_data, tmp_path)
    made = (tmp_path / "checkpoint-12" / STATE_FILE).stat().st_mtime_ns
    _, values = read_state(tmp_path / "checkpoint-12", made_with(SHORT, tiny_data))
    again = train(SHORT, tiny_data, tmp_path)
    assert (tmp_path / "checkpoint-12" / STATE_FILE).stat().st_mtime_ns == made
    assert again.validation_k_hat == first.validation_k_hat
    assert values["seconds"] < again.seconds  # both runs, together
    for name, value in first.heads.state_dict().items():
        assert torch.equal(value, again.heads.state_dict()[name]), name


def test_the_log_says_how_it_goes(tiny_data: TrainingData, tmp_path: Path) -> None:
    trained = train(SHORT, tiny_data, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "train-log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines[0]["loss"] > lines[-1]["loss"] > 0
    assert lines[-1]["validation_k_hat"] == round(trained.validation_k_hat, 4)
    assert lines[-1]["skipped_batches"] == trained.skipped_batches == 0
    assert list((tmp_path / "runs").rglob("events.*"))  # TensorBoard's


def test_learning_rate_rises_then_falls(tiny_data: TrainingData, tmp_path: Path) -> None:
    config = replace(TINY, steps=20, warmup=0.2, learning_rate=1.0, validate_every=1)
    trainer = make_trainer(config, tiny_data, tmp_path)
    trainer.validate = lambda _: 1.0
    trainer.run()
    logs = [log for log in trainer.state.log_history if "learning_rate" in log]
    rates = [log["learning_rate"] for log in logs]
    assert max(rates) == rates[4] == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.02


@pytest.mark.parametrize("broken", ["weights", "states"])
def test_what_is_not_finite_stops_the_run(
    broken: str, tiny_data: TrainingData, tmp_path: Path
) -> None:
    config = replace(SHORT, batch_size=32)
    data = tiny_data
    if broken == "states":
        hidden_TD = [shard.clone() for shard in data.texts.hidden_TD]
        hidden_TD[0][:] = float("nan")
        data = replace(data, texts=replace(data.texts, hidden_TD=hidden_TD))
    trainer = make_trainer(config, data, tmp_path)
    if broken == "weights":
        with torch.no_grad():
            next(trainer.objective.parameters()).fill_(float("nan"))
    with pytest.raises(
        HeadsError, match=r"loss: found nan at step 0, on 32 rows of answers \d"
    ) as e:
        trainer.run()
    assert ("are themselves not finite" in str(e.value)) == (broken == "states")
    assert not list(tmp_path.glob("checkpoint-*"))


def test_draft_vocabulary_is_of_the_training_split(tiny_data: TrainingData) -> None:
    texts, ids_V = tiny_data.texts, tiny_data.draft_ids_V
    assert ids_V is not None
    assert len(ids_V) == 80
    seen = torch.unique(texts.sampled_T[tiny_data.train_T])
    assert torch.isin(seen, ids_V).all() or len(seen) > 80
    assert torch.equal(tiny_data.labels_TK, to_draft_ids(texts.next_TK, ids_V, 97))


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 0},
        {"distillation": 1.5},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"head_loss": "all"},
        {"mode": "thaw"},
        {"logits_chunk": 0},
        {"tuned_target": Path("t")},
    ],
)
def test_impossible_options(values: dict[str, object]) -> None:
    with pytest.raises(HeadsError, match=next(iter(values))):
        replace(TINY, **values)  # type: ignore[arg-type]


def test_finetune_wants_a_folder() -> None:
    with pytest.raises(HeadsError, match="tuned_target: found None; expected a folder"):
        replace(TINY, mode="finetune")


def test_a_split_without_rows(tiny_target: Path, tiny_answers: Path, tmp_path: Path) -> None:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path)
    with pytest.raises(HeadsError, match="leaves none for validation"):
        prepare(replace(TINY, validation=0.0), shards, read_rows(str(tiny_target)))
