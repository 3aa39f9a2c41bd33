"""State on disk: other runs and damaged files are refused, and nothing is ever pickled."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_training.train import TrainingData, train
from heads_training.training_state import STATE_FILE
from tests.heads_training.made_data import TINY
from vllm_bpd.errors import HeadsError

SHORT = replace(TINY, steps=4, validate_every=2)


def test_other_options_are_refused_by_name(tiny_data: TrainingData, tmp_path: Path) -> None:
    train(SHORT, tiny_data, tmp_path)
    with pytest.raises(HeadsError, match=r"learning_rate: found 0\.004, this run has 0\.001"):
        train(replace(SHORT, learning_rate=1e-3), tiny_data, tmp_path)
    ids = [tiny_data.texts.ids[0].flip(0), *tiny_data.texts.ids[1:]]
    other = replace(tiny_data, texts=replace(tiny_data.texts, ids=ids))
    with pytest.raises(HeadsError, match=r"answers: found '[0-9a-f]+', this run has"):
        train(SHORT, other, tmp_path)


def test_a_damaged_state_is_refused(tiny_data: TrainingData, tmp_path: Path) -> None:
    train(SHORT, tiny_data, tmp_path)
    (tmp_path / "checkpoint-4" / STATE_FILE).write_bytes(b"cut off")
    with pytest.raises(HeadsError, match="not a training state"):
        train(SHORT, tiny_data, tmp_path)


def test_one_state_is_kept_and_half_written_ones_are_passed_over(
    tiny_data: TrainingData, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-9.partial").mkdir()
    train(SHORT, tiny_data, tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_nothing_is_pickled(
    tiny_data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle")

    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    train(replace(SHORT, steps=6), tiny_data, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "checkpoint-6").rename(tmp_path / "b" / "checkpoint-6")
    train(replace(SHORT, steps=6), tiny_data, tmp_path / "b")
    written = {path.suffix for path in tmp_path.rglob("checkpoint-*/*")}
    assert written == {".safetensors", ".json"}
