"""`bpd-train export`: a checkpoint from a training state, or from other heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads_training.cli import main
from heads_training.loop import HeadsTrainer
from vllm_bpd.checkpoint import load_heads, read_config, save_heads
from vllm_bpd.heads import BlockwiseHeads


@pytest.fixture
def words(tiny_target: Path, tiny_answers: Path, tmp_path: Path) -> list[str]:
    """Options of a small run of six steps, whose state is saved every three."""
    shape = ["--num-draft-heads=2", "--head-hidden-size=16", "--draft-vocab-size=90"]
    places = [f"--target={tiny_target}", f"--answers={tiny_answers}", f"--work={tmp_path / 'work'}"]
    run = ["--steps=6", "--validate-every=3", "--validation=0.3", "--no-autocast"]
    return [*places, *shape, *run]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_is_exported_before_its_end(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = HeadsTrainer.training_step

    def stopped(self: HeadsTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    early, late, trained = tmp_path / "early", tmp_path / "late", tmp_path / "trained"
    with monkeypatch.context() as patched:
        patched.setattr(HeadsTrainer, "training_step", stopped)
        assert main(["train", *words, f"--output={trained}"]) == 130
    assert not trained.exists()
    assert main(["export", *words, f"--output={early}"]) == 0
    assert json.loads((early / "provenance.json").read_text())["training_state"] == "checkpoint-3"
    assert weights(early)["output_layer.weight"].any()  # it is zero at step 0
    assert main(["train", *words, f"--output={trained}"]) == 0
    assert main(["export", *words, f"--output={late}"]) == 0
    assert same(late, trained)
    assert not same(early, trained)
    assert read_config(late) == read_config(trained)


def test_heads_are_exported_in_another_dtype(words: list[str], tmp_path: Path) -> None:
    trained, wide, back = tmp_path / "trained", tmp_path / "wide", tmp_path / "back"
    assert main(["train", *words, f"--output={trained}"]) == 0
    target = words[0]
    command = ["export", target, f"--heads={trained}", f"--output={wide}", "--dtype=float32"]
    assert main(command) == 0
    assert weights(wide)["hidden_layer.weight"].dtype == torch.float32
    assert main(["export", target, f"--heads={wide}", f"--output={back}"]) == 0
    for name in ("config.json", "model.safetensors", "provenance.json"):
        assert (back / name).read_bytes() == (trained / name).read_bytes(), name


def test_what_cannot_be_exported(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["export", *words, f"--output={tmp_path / 'out'}", *arguments]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert not (tmp_path / "out").exists()
        return line

    assert f"work: {tmp_path / 'work'}: found no training state" in refused()
    tuned = refused("--mode=finetune", f"--tuned-target={tmp_path / 'tuned'}")
    assert "mode: found finetune; expected frozen" in tuned
    assert main(["train", *words, f"--output={tmp_path / 'trained'}"]) == 0
    assert "seed: found 0, this run has 1" in refused("--seed=1")
    heads, ids_V = load_heads(tmp_path / "trained")
    fingerprint = replace(heads.config.target, vocab_size=98)
    other = BlockwiseHeads(replace(heads.config, target=fingerprint))
    save_heads(tmp_path / "other", other, ids_V)
    assert "vocab_size" in refused(f"--heads={tmp_path / 'other'}")
