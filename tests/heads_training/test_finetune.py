"""The target and its heads trained together, and the new target that comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from heads_training.cli import main
from heads_training.finetune import MARK_FILE, make_objective
from heads_training.target import load_model, read_rows
from heads_training.train import Trained, TrainingData, make_steps, new_heads, train
from heads_training.validation import agreement
from tests.heads_training.made_data import TINY
from vllm_bpd.checkpoint import read_config
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import explain_mismatch, read_fingerprint

CONFIG = replace(
    TINY,
    mode="finetune",
    tuned_target=Path("t"),
    steps=30,
    validate_every=15,
    distillation=0.0,
    autocast=True,
)


@pytest.fixture(scope="module")
def tuned(
    tiny_data: TrainingData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Trained]:
    """A folder with the new target and the run's work, and the heads."""
    folder = tmp_path_factory.mktemp("tuned")
    config = replace(CONFIG, tuned_target=folder / "target")
    return folder, train(config, tiny_data, folder / "work")


def test_both_are_trained(
    tuned: tuple[Path, Trained], tiny_target: Path, tiny_data: TrainingData
) -> None:
    folder, trained = tuned
    lines = (folder / "work" / "train-log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert log[-1]["loss"] < log[0]["loss"]
    assert trained.heads.output_layer.weight.abs().max() > 0  # type: ignore[operator]
    old, new = (load_file(path / "model.safetensors") for path in (tiny_target, folder / "target"))
    assert old.keys() == new.keys()
    assert all(old[name].dtype == new[name].dtype for name in old)
    moved = [name for name in old if not torch.equal(old[name], new[name])]
    assert {"lm_head.weight", "model.embed_tokens.weight"} < set(moved)
    state = load_file(folder / "work" / "checkpoint-30" / "state.safetensors")
    assert torch.equal(state["model.base.lm_head.weight"].bfloat16(), new["lm_head.weight"])


def test_the_new_target_is_a_plain_checkpoint(
    tuned: tuple[Path, Trained], tiny_target: Path
) -> None:
    folder = tuned[0] / "target"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == load_model(str(tiny_target)).dtype
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", MARK_FILE}
    assert "another model than" in (folder / "README.md").read_text()


def test_heads_are_of_the_new_target(tuned: tuple[Path, Trained], tiny_data: TrainingData) -> None:
    folder, trained = tuned
    found = read_fingerprint(folder / "target")
    assert trained.heads.config.target == trained.target.fingerprint == found
    assert "lm_head_hash" in str(explain_mismatch(found, tiny_data.target.fingerprint))


def test_a_finished_run_writes_its_target_again(
    tuned: tuple[Path, Trained], tiny_data: TrainingData
) -> None:
    folder, trained = tuned
    config = replace(CONFIG, tuned_target=folder / "again")
    for _ in range(2):  # the second replaces what the first wrote
        again = train(config, tiny_data, folder / "work")
    assert again.target.fingerprint == trained.target.fingerprint
    assert again.validation_k_hat == trained.validation_k_hat


def test_a_target_that_looks_like_the_old_one_is_told(
    tiny_data: TrainingData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, tuned_target=tmp_path / "t", steps=1, base_learning_rate=1e-12)
    trained = train(config, tiny_data, tmp_path / "work")
    assert trained.target.fingerprint == tiny_data.target.fingerprint
    assert "neither target will refuse the other's heads" in caplog.text


def test_another_folder_is_not_overwritten(tiny_data: TrainingData, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    config = replace(CONFIG, tuned_target=tmp_path)
    with pytest.raises(HeadsError, match=r"tuned_target: .* found something other than a target"):
        train(config, tiny_data, tmp_path / "work")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_tied_matrices_stay_tied(
    tiny_data: TrainingData, tiny_target: Path, tmp_path: Path
) -> None:
    model = load_model(str(tiny_target))
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "tied")
    data = replace(tiny_data, target=read_rows(str(tmp_path / "tied")))
    config = replace(CONFIG, tuned_target=tmp_path / "new", steps=4, validate_every=2)
    trained = train(config, data, tmp_path / "work")
    names = load_file(tmp_path / "new" / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    assert torch.equal(trained.target.lm_head_VD, trained.target.embedding_VD)
    assert not torch.equal(trained.target.lm_head_VD, data.target.lm_head_VD)
    again = train(replace(config, tuned_target=tmp_path / "two"), data, tmp_path / "work")
    assert again.target.fingerprint == trained.target.fingerprint


def test_agreement_is_with_the_row_that_a_draft_is_for() -> None:
    chosen_R = torch.tensor([5, 6, 7, 8])
    drafts_RK = torch.tensor([[6, 7], [7, 0], [8, 9], [1, 1]])
    expected = [[True, True], [True, False], [True, False], [False, False]]
    assert agreement(drafts_RK, chosen_R).tolist() == expected


def test_from_the_command_line(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, new = tmp_path / "heads", tmp_path / "new"
    words = ["train", "--target", str(tiny_target), "--answers", str(tiny_answers)]
    words += ["--output", str(heads), "--work", str(tmp_path / "work")]
    words += [
        "--mode",
        "finetune",
        "--tuned-target",
        str(new),
        "--steps",
        "4",
        "--batch-texts",
        "3",
    ]
    words += ["--num-draft-heads", "2", "--head-hidden-size", "16", "--draft-vocab-size", "90"]
    assert main([*words, "--validation", "0.3", "--no-autocast"]) == 0
    assert read_config(heads).target == read_fingerprint(new)
    made = json.loads((heads / "provenance.json").read_text())
    assert made["recipe"]["train"]["tuned_target"] == "new"  # no paths
    assert made["target_fingerprint"]["lm_head_hash"] == read_fingerprint(new).lm_head_hash
    capsys.readouterr()
    bad = [word if word != str(new) else str(tiny_target) for word in words]
    assert main(bad) == 2
    assert "tuned_target: " in capsys.readouterr().err


def test_packed_answers_give_the_loss_of_padded_ones(tiny_data: TrainingData) -> None:
    """Together in rows, several answers a row; each in a row of its own; the same loss and pull."""
    found = {}
    for packing in (True, False):
        config = replace(CONFIG, packing=packing, autocast=False, batch_texts=8)
        torch.manual_seed(0)
        objective = make_objective(config, tiny_data, new_heads(config, tiny_data))
        batch = make_steps(config, tiny_data)[0]
        objective.train()
        loss = objective(**batch)["loss"]
        loss.backward()
        pull = objective.base.model.layers[0].mlp.up_proj.weight.grad
        found[packing] = (batch["ids_BL"].shape[0], loss.detach(), pull)
    assert found[True][0] < found[False][0] == 8
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[True][2], found[False][2], rtol=1e-3, atol=1e-6)
