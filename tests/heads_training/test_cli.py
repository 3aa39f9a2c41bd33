"""`bpd-train` end to end on a tiny target, and its one-line errors."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import heads_training
from heads_training.cli import build_parser, main, recipe_from
from heads_training.generate import GenerateConfig
from heads_training.train import TrainConfig
from tests.heads_training.tiny_chat import write_chat_target
from vllm_bpd.checkpoint import read_config

_OWN_IMPORTS = {"config", "heads", "checkpoint", "fingerprint", "errors", "lattice"}


def test_train_and_evaluate(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, work, report = tmp_path / "heads", tmp_path / "work", tmp_path / "report.json"
    shape = ["--num-draft-heads", "2", "--head-hidden-size", "16", "--draft-vocab-size", "90"]
    run = ["--steps", "6", "--validate-every", "3", "--validation", "0.3", "--no-autocast"]
    given = ["--target", str(tiny_target), "--answers", str(tiny_answers), "--work", str(work)]
    assert main(["train", *given, "--output", str(heads), *shape, *run]) == 0
    config = read_config(heads)
    assert (config.num_draft_heads, config.draft_vocab_size) == (2, 90)
    made = json.loads((heads / "provenance.json").read_text())
    assert made["recipe"]["train"]["steps"] == 6
    assert made["recipe"]["target"] == tiny_target.name
    assert made["data"]["records"] == 12
    assert f"--answers {tiny_answers.name} --work work --output heads" in made["command"]
    assert str(tmp_path.parent) not in (heads / "provenance.json").read_text()  # no paths
    assert len((work / "train-log.jsonl").read_text().splitlines()) == 2
    trained = json.loads((work / "evaluation.json").read_text())
    assert (work / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    # Without being told the share held out, the same answers.
    held_out = ["evaluate", "--heads", str(heads), *given, "--json", str(report)]
    assert main(held_out) == 0
    assert json.loads(report.read_text()) == trained
    assert main([*held_out, "--on", str(tiny_answers), "--plot", str(tmp_path / "p.svg")]) == 0
    values = json.loads(report.read_text())
    assert trained["answers"] < values["answers"] == 12
    assert set(values["by_k"]) == {"2", "3"}
    assert set(values["by_group"]) == {"even", "odd"}
    assert values["by_source"]["odd:a"]["answers"] == 6
    assert "k = 3" in capsys.readouterr().out
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_states_made_online_train_the_same_heads(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    made = {}
    for states in ("cached", "online"):
        work, heads = tmp_path / states / "work", tmp_path / states / "heads"
        run = ["--steps", "4", "--validation", "0.3", "--no-autocast", "--head-hidden-size", "16"]
        given = ["--target", str(tiny_target), "--answers", str(tiny_answers), "--work", str(work)]
        run += ["--draft-vocab-size", "90", "--states", states]
        assert main(["train", *given, "--output", str(heads), *run]) == 0
        made[states] = (heads / "model.safetensors").read_bytes()
        assert (work / "states").exists() == (states == "cached")
    assert made["cached"] == made["online"]


@pytest.mark.parametrize(
    "command", [[], ["all"], ["generate"], ["train"], ["evaluate"], ["export"]]
)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "target: found none; expected a model folder or hub id: --target MODEL"),
        (["--target", "t"], "target: found 't'; expected a model folder"),
        (["--target", "no/such/folder"], "target: found 'no/such/folder'; expected a model folder"),
        (["--target", "{tmp}"], "target: {tmp}: found a folder without config.json"),
    ],
)
def test_a_missing_target_is_named_by_every_command(
    command: list[str],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    assert main([*command, *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: " + said.replace("{tmp}", str(tmp_path)))
    assert not list(tmp_path.iterdir())  # nothing begun


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--target", "{target}", "--answers", "none"], "answers: none: found no answer"),
        (["--target", "t", "--steps", "0"], "steps: found 0"),
        (["--target", "t", "--steps", "many"], "--steps: invalid int value"),
        (["evaluate", "--heads", "none", "--target", "{target}"], "none/config.json"),
        (["train", "--target", "{target}", "--plot", "p.gif"], "plot: found p.gif"),
        (["train", "--target", "{target}", "--json", "."], "json: found ., a folder; expected a"),
        (["train", "--target", "{target}", "--work", __file__], f"work: found {__file__}, a file"),
        (["generate", "--target", "t", "--self-written", "0"], "self_written"),
        (
            ["generate", "--target={target}", "--prompts=none.jsonl", "--answer-tokens=99"],
            "none.jsonl",
        ),
        (["generate", "--target", "t", "--worker", "3"], "worker: found 3"),
        (["--config", "none.yaml"], "config: found 'none.yaml'; expected a recipe file, or one of"),
        (["fly"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    said: str,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        status = main([word.replace("{target}", str(tiny_target)) for word in arguments])
    except SystemExit as stop:  # argparse's own
        status = int(stop.code or 0)
    err = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert err[-1].startswith("error: ")
    assert said in err[-1]
    assert len(err) == 1


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("target: t\nwork: w\ntrain:\n  steps: 7\n  seed: 5\n  learning_rate: 1e-3\n")
    words = ["all", "--config", str(path), "--prompts", "a", "b", "--no-autocast", "--seed", "3"]
    recipe = recipe_from(build_parser().parse_args(words))
    answers = Path("w/answers")
    assert recipe.generate == GenerateConfig("t", answers, (Path("a"), Path("b")), seed=3)
    assert recipe.train == TrainConfig(steps=7, seed=3, learning_rate=1e-3, autocast=False)
    recipe = recipe_from(build_parser().parse_args(["generate", *words[1:6], "--seed", "3"]))
    assert (recipe.generate.seed, recipe.train.seed) == (3, 5)  # a stage's flags are its own


def test_a_finetune_is_evaluated_beside_its_own_target(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {tiny_target}\nanswers: {tiny_answers}\noutput: {tmp_path / 'heads'}\n"
        f"work: {tmp_path / 'work'}\ntrain:\n  mode: finetune\n  num_draft_heads: 2\n"
        f"  tuned_target: {tmp_path / 'tuned'}\n  head_hidden_size: 16\n  draft_vocab_size: 0\n"
        "  steps: 3\n  validation: 0.3\n  autocast: false\n  base_learning_rate: 1e-3\n"
    )
    assert main(["train", f"--config={recipe}"]) == 0
    trained = json.loads((tmp_path / "work" / "evaluation.json").read_text())
    assert trained["target"] == "tuned"
    assert main(["evaluate", f"--config={recipe}"]) == 0
    assert json.loads((tmp_path / "work" / "evaluation.json").read_text()) == trained


def test_a_short_context_needs_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a model's name to answers, with the defaults, by a target of 512 tokens."""
    words = ["generate", f"--target={write_chat_target(tmp_path / 'target')}"]
    words += [f"--work={tmp_path}", "--engine=transformers", "--self-written=2"]
    assert main(words) == 0
    made = json.loads((tmp_path / "answers" / "generate.json").read_text())
    assert made["max_model_len"] == 512
    assert main([*words, "--answers", str(tmp_path / "a"), "--max-model-len=600"]) == 2
    assert "max_model_len: found 600; the target's context is 512" in capsys.readouterr().err
    assert main([*words, "--answers", str(tmp_path / "b"), "--answer-tokens=512"]) == 2
    assert "max_model_len: found 512; expected more than answer_tok" in capsys.readouterr().err


def test_vllm_is_imported_only_to_generate() -> None:
    for path in Path(heads_training.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom | ast.Import):
                continue
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            for name in names:
                top, _, rest = name.partition(".")
                if top == "vllm_bpd":
                    assert rest in _OWN_IMPORTS, (path, name)
                if top == "vllm":
                    assert path.name == "engines.py", path
                    assert node not in tree.body, "import vLLM inside functions"
