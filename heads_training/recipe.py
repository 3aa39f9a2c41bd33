"""Recipes: everything that one set of heads is made with, in one file or on the command line.

A recipe is YAML with the fields of `Recipe`, four of which are sections: `generate`, `train`,
`evaluate` and `export`. What a file leaves out has its default; flags are laid over the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from heads_training.generate import GenerateConfig
from heads_training.options import Option, options_of
from heads_training.train import TrainConfig
from vllm_bpd.errors import HeadsError

FOLDER = Path(__file__).parent / "recipes"  # those that come with the package


@dataclass(frozen=True)
class EvaluateConfig:
    """What heads are evaluated on, and where the figures go."""

    on: Annotated[
        Path | None,
        "answer file, or folder of them, evaluated whole; without it the answers held out from "
        "training",
    ] = None
    json: Annotated[Path | None, "file for the report; without it WORK/evaluation.json"] = None
    plot: Annotated[
        Path | None, "picture of the report, .png or .svg; without it beside the report"
    ] = None


@dataclass(frozen=True)
class ExportConfig:
    """What `bpd-train export` makes a checkpoint from, and how it stores it."""

    heads: Annotated[
        Path | None, "heads to export; without it the newest training state in WORK"
    ] = None
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], "of the exported weights"] = (
        "bfloat16"
    )


@dataclass(frozen=True)
class Recipe:
    """Everything that one set of heads is made with."""

    target: Annotated[str, "model folder or hub id"]
    generate: GenerateConfig
    output: Annotated[Path, "folder of the heads' checkpoint"] = Path("bpd_heads")
    work: Annotated[Path, "folder of answers, hidden states, training and reports"] = Path(
        "bpd-work"
    )
    answers: Annotated[
        Path | None, "folder of the training answers, or one file; without it WORK/answers"
    ] = None
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    @property
    def served_target(self) -> str:
        """The target that the heads are of: fine-tuning makes a new one."""
        return str(self.train.tuned_target or self.target)

    @property
    def answers_path(self) -> Path:
        """Where the training answers are."""
        return self.generate.output

    @property
    def report_path(self) -> Path:
        """Where the evaluation's report goes."""
        return self.evaluate.json or self.work / "evaluation.json"

    @property
    def plot_path(self) -> Path:
        """Where its picture goes."""
        return self.evaluate.plot or self.report_path.with_suffix(".png")

    def describe(self) -> dict[str, Any]:
        """Plain data for provenance; paths cut to their last part, the target's among them."""
        values = _plain(asdict(self))
        values["target"] = Path(self.target).name
        for name in _GIVEN_BY_RECIPE:
            del values["generate"][name]
        for name in ("teacher", "dataset"):  # a folder, or a hub id
            value = values["generate"][name]
            values["generate"][name] = Path(value).name if value else None
        return dict(values)


_SECTIONS = {
    "generate": GenerateConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
}
_GIVEN_BY_RECIPE = ("target", "output")  # fields of GenerateConfig that follow from the recipe's

TOP = options_of(Recipe, skip=tuple(_SECTIONS))
SECTIONS = {
    name: options_of(record, skip=_GIVEN_BY_RECIPE if name == "generate" else ())
    for name, record in _SECTIONS.items()
}


@dataclass(frozen=True)
class RecipeFile:
    """The checked fields of a file: (section, field) to value; the section of the first is ""."""

    values: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    where: Mapping[tuple[str, str], str] = field(default_factory=dict)  # FILE:LINE of each


def shipped() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_recipe(name: str) -> RecipeFile:
    """The recipe in the file `name`, or the one of that name that comes with the package.

    Raises HeadsError naming file, line and section for anything but known fields of their types.
    """
    path = Path(name)
    if not path.is_file() and name in shipped():
        path = FOLDER / f"{name}.yaml"
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise HeadsError(
            f"config: found {name!r}; expected a recipe file, or one of {', '.join(shipped())} "
            f"({getattr(error, 'strerror', None) or error})"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise HeadsError(f"{path}{line}: not YAML ({problem})") from None
    values: dict[tuple[str, str], Any] = {}
    where: dict[tuple[str, str], str] = {}
    for key, node in _pairs(root, str(path), "the recipe", [o.name for o in TOP], _SECTIONS):
        if key not in SECTIONS:
            _take(TOP, "", key, node, str(path), values, where)
            continue
        names = [option.name for option in SECTIONS[key]]
        for inner, value in _pairs(node, str(path), f"section {key}", names):
            _take(SECTIONS[key], key, inner, value, str(path), values, where)
    return RecipeFile(values, where)


def _pairs(
    node: Any, path: str, what: str, names: list[str], sections: Mapping[str, Any] | None = None
) -> list[tuple[str, Any]]:
    """The (key, value node) of a mapping whose keys are `names` or `sections`, each once."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~")):
        return []
    if not isinstance(node, yaml.MappingNode):
        raise HeadsError(
            f"{path}:{node.start_mark.line + 1}: {what}: expected fields, each `name: value`"
        )
    known = [*names, *(sections or ())]
    pairs: list[tuple[str, Any]] = []
    for key, value in node.value:
        line, name = key.start_mark.line + 1, str(key.value)
        if name not in known:
            raise HeadsError(
                f"{path}:{line}: {what} has no field {name!r}; {_nearest(name, known)}"
            )
        if any(name == other for other, _ in pairs):
            raise HeadsError(f"{path}:{line}: {what}: {name} is given twice; leave one")
        pairs.append((name, value))
    return pairs


def _nearest(name: str, known: list[str]) -> str:
    """What may have been meant: a field of another section, or the nearest name of this one."""
    for section, options in {"": TOP, **SECTIONS}.items():
        if any(name == option.name for option in options):
            return f"section {section} has it" if section else "it belongs outside the sections"
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"


def _take(
    options: list[Option],
    section: str,
    name: str,
    node: Any,
    path: str,
    values: dict[tuple[str, str], Any],
    where: dict[tuple[str, str], str],
) -> None:
    (option,) = (option for option in options if option.name == name)
    place = f"{path}:{node.start_mark.line + 1}" + (f": section {section}" if section else "")
    try:
        values[section, name] = option.convert(yaml.SafeLoader("").construct_document(node))
    except HeadsError as error:
        raise HeadsError(f"{place}: {error}") from None
    except yaml.YAMLError as error:
        raise HeadsError(f"{place}: {name}: {str(error).splitlines()[0]}") from None
    where[section, name] = place


def make_recipe(
    file: RecipeFile, flags: Mapping[str, Any], flag_sections: Sequence[str] = tuple(_SECTIONS)
) -> Recipe:
    """The recipe of `file` with `flags` (field name to value) laid over it.

    A flag sets the field of its name in every section of `flag_sections` that has one. Raises
    HeadsError, naming the place in the file where there is one, for a missing target or
    impossible values.
    """
    top = _layer("", TOP, file, flags)
    if "target" not in top:
        raise HeadsError(
            "target: found none; expected a model folder or hub id: --target MODEL, or `target:` "
            "in the recipe"
        )
    answers = top.get("answers") or top.get("work", Recipe.work) / "answers"
    made: dict[str, Any] = {}
    for name, record in _SECTIONS.items():
        own = flags if name in flag_sections else {}
        given = _layer(name, SECTIONS[name], file, own)
        if name == "generate":
            given |= {"target": top["target"], "output": answers}
        try:
            made[name] = record(**given)
        except HeadsError as error:
            field_name = str(error).partition(":")[0]
            place = None if field_name in own else file.where.get((name, field_name))
            raise HeadsError(f"{place}: {error}" if place else str(error)) from None
    return Recipe(**top, **made)


def _layer(
    section: str, options: list[Option], file: RecipeFile, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a section that are given, by the file or, before it, by a flag."""
    given: dict[str, Any] = {}
    for option in options:
        if (section, option.name) in file.values:
            given[option.name] = file.values[section, option.name]
        if option.name in flags:
            value = flags[option.name]
            given[option.name] = tuple(value) if option.many else value
    return given


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
