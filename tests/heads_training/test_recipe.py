"""Recipes: those that ship load, and anything that is not a known field of its type is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from heads_training.generate import GenerateConfig
from heads_training.recipe import (
    FOLDER,
    SECTIONS,
    TOP,
    EvaluateConfig,
    RecipeFile,
    make_recipe,
    read_recipe,
    shipped,
)
from heads_training.train import TrainConfig
from vllm_bpd.errors import HeadsError

WHOLE = """\
target: org/model
output: out
work: w
answers: given.jsonl
generate:
  prompts: [a.jsonl, b/c.jsonl]
  self_written: 10
train:
  steps: 20
  learning_rate: 2e-3
  warmup: 0
  conditioning: none
  autocast: false
evaluate:
  on: dev.jsonl
  json: null
"""


def written(folder: Path, text: str) -> str:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_load(name: str) -> None:
    recipe = make_recipe(read_recipe(name), {})
    assert "/" in recipe.target  # a hub id
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    for key, value in values["train"].items():
        assert getattr(recipe.train, key) == value
    assert make_recipe(read_recipe(str(FOLDER / f"{name}.yaml")), {}) == recipe  # by path, too


def test_there_are_recipes_for_both_kinds_of_machine() -> None:
    assert {name.rsplit("-", 1)[1] for name in shipped()} == {"cpu", "gpu"}


def test_every_field_is_read(tmp_path: Path) -> None:
    recipe = make_recipe(read_recipe(written(tmp_path, WHOLE)), {})
    prompts = (Path("a.jsonl"), Path("b/c.jsonl"))
    assert recipe.generate == GenerateConfig("org/model", Path("given.jsonl"), prompts, 10)
    assert recipe.train == TrainConfig(
        steps=20, learning_rate=2e-3, warmup=0.0, conditioning="none", autocast=False
    )
    assert recipe.evaluate == EvaluateConfig(on=Path("dev.jsonl"))
    assert (recipe.output, recipe.work) == (Path("out"), Path("w"))
    assert recipe.plot_path == Path("w/evaluation.png")


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    recipe = make_recipe(read_recipe(written(tmp_path, "train:\n")), {"target": "t"})
    assert recipe.train == TrainConfig()
    assert recipe.answers_path == Path("bpd-work/answers")
    assert make_recipe(RecipeFile(), {"target": "t"}) == recipe


def test_every_option_is_documented() -> None:
    for option in [*TOP, *(option for section in SECTIONS.values() for option in section)]:
        assert option.help, option.name
        assert option.expected(), option.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("targt: t", "r.yaml:1: the recipe has no field 'targt'; did you mean 'target'?"),
        ("target: t\nstep: 3", ":2: the recipe has no field 'step'"),
        ("target: t\nsteps: 3", ":2: the recipe has no field 'steps'; section train has it"),
        (
            "train:\n  lerning_rate: 1",
            ":2: section train has no field 'lerning_rate'; did you mean 'learning_rate'?",
        ),
        ("train:\n  target: t", ":2: section train has no field 'target'; it belongs outside"),
        ("train:\n  chunk: 3", ":2: section train has no field 'chunk'; section generate has it"),
        ("generate:\n  output: o", ":2: section generate has no field 'output'"),
        (
            "train:\n  zzz: 1",
            ":2: section train has no field 'zzz'; it has mode, num_draft_heads, ",
        ),
        ("train:\n  steps: 2.5", ":2: section train: steps: found 2.5; expected a whole number"),
        ("train:\n  steps: true", ":2: section train: steps: found True; expected a whole number"),
        ("train:\n  steps: many", "steps: found 'many'; expected a whole number (optimiser steps)"),
        ("train:\n  steps:", "steps: found nothing; expected a whole number"),
        ("train:\n  autocast: 1", "autocast: found 1; expected true or false"),
        ("train:\n  warmup: much", "warmup: found 'much'; expected a number"),
        ("train:\n  activation: tanh", "activation: found 'tanh'; expected relu or silu or gelu"),
        ("generate:\n  prompts: a.jsonl", "prompts: found 'a.jsonl'; expected a list, each a path"),
        ("generate:\n  prompts: [1]", "prompts: found [1]; expected a list"),
        ("target: 7", "r.yaml:1: target: found 7; expected text"),
        ("train: 7", ":1: section train: expected fields, each `name: value`"),
        ("- target", ":1: the recipe: expected fields"),
        ("target: t\ntarget: u", ":2: the recipe: target is given twice"),
        ("target: [", "not YAML"),
        ("target: !!python/name:os.system", "target: could not determine a constructor"),
    ],
)
def test_what_is_not_a_known_field_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(HeadsError) as refusal:
        read_recipe(written(tmp_path, text))
    assert said in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_impossible_values_name_their_line(tmp_path: Path) -> None:
    file = read_recipe(written(tmp_path, "target: t\ntrain:\n\n  steps: 0\n"))
    with pytest.raises(HeadsError, match=r"r\.yaml:4: section train: steps: found 0; expected"):
        make_recipe(file, {})
    with pytest.raises(HeadsError, match=r"^steps: found -1"):  # the flag's, no line of the file
        make_recipe(file, {"steps": -1})


def test_provenance_has_everything_and_no_paths(tmp_path: Path) -> None:
    flags = {"target": "/models/tiny", "work": Path("/somewhere/w")}
    described = make_recipe(read_recipe(written(tmp_path, WHOLE)), flags).describe()
    assert described["target"] == "tiny"
    assert described["work"] == "w"
    assert described["generate"]["prompts"] == ["a.jsonl", "c.jsonl"]
    assert set(described["train"]) == {option.name for option in SECTIONS["train"]}
    assert "/" not in str(described)
