"""`bpd-train` end to end on a tiny target, and its one-line errors."""

from __future__ import annotations

import ast
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

import heads_training
from heads_training.cli import build_parser, from_args, main
from heads_training.generate import GenerateConfig, generate
from heads_training.train import TrainConfig
from vllm_bpd.checkpoint import read_config
from vllm_bpd.errors import HeadsError

_OWN_IMPORTS = {"config", "heads", "checkpoint", "fingerprint", "errors"}


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
    assert made["config"]["steps"] == 6
    assert made["data"]["records"] == 12
    assert f"--answers {tiny_answers.name} --work work --output heads" in made["command"]
    assert str(tmp_path.parent) not in (heads / "provenance.json").read_text()  # no paths
    assert len((work / "train-log.jsonl").read_text().splitlines()) == 2
    assert main(["evaluate", "--heads", str(heads), *given, "--json", str(report)]) == 0
    values = json.loads(report.read_text())
    assert set(values["by_k"]) == {"2", "3"}
    assert set(values["by_group"]) == {"even", "odd"}
    assert values["by_source"]["odd:a"]["answers"] == 6
    assert "k = 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "required: --target"),
        (["train", "--target", "t", "--answers", "none", "--output", "o"], "target"),
        (["train", "--target", "t", "--answers", "a", "--output", "o", "--steps", "0"], "steps"),
        (["evaluate", "--heads", "none", "--target", "t", "--answers", "a"], "none/config.json"),
        (["answers", "--target", "t", "--output", "o"], "self_written"),
        (["answers", "--target", "t", "--output", "o", "--prompts", "none.jsonl"], "none.jsonl"),
        (["generate", "--target", "t", "--output", "o", "--worker", "3"], "worker: found 3"),
        (["fly"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse's own
        status = int(stop.code or 0)
    err = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert err[-1].startswith("error: ")
    assert said in err[-1]
    assert len(err) == 1


def test_options_mirror_the_records() -> None:
    args = build_parser().parse_args(
        ["all", "--target", "t", "--output", "o", "--prompts", "a", "b", "--no-autocast"]
    )
    config = from_args(GenerateConfig, args, output=Path("x"))
    assert config == GenerateConfig("t", Path("x"), (Path("a"), Path("b")))
    assert from_args(TrainConfig, args) == TrainConfig(autocast=False)
    assert {f.name for f in fields(TrainConfig)} <= set(vars(args))


def test_finished_answers_need_no_engine(tmp_path: Path) -> None:
    (tmp_path / "answers-00000.jsonl").write_text("")
    assert generate(GenerateConfig("t", tmp_path, self_written=5)) == 0


def test_other_options_do_not_mix_with_answers(tmp_path: Path) -> None:
    (tmp_path / "answers-00000.jsonl").write_text("")
    config = GenerateConfig("models/t", tmp_path, self_written=5)
    assert generate(config) == 0
    assert "models" not in (tmp_path / "generate.json").read_text()  # names, no paths
    with pytest.raises(HeadsError, match="seed: found 0, this run has 1"):
        generate(replace(config, seed=1))
    (tmp_path / "generate.json").write_text("[")
    with pytest.raises(HeadsError, match="not readable"):
        generate(config)


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
                    assert path.name == "generate.py", path
                    assert node not in tree.body, "import vLLM inside functions"
