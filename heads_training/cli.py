"""`bpd-train`: from a model's name to heads worth serving, all at once or stage by stage.

Options are the fields of `Recipe` and of its sections; their help is the fields' own.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from heads_training.options import Option, add_flags
from heads_training.recipe import SECTIONS, TOP, Recipe, RecipeFile, make_recipe, read_recipe
from heads_training.recipe import shipped as shipped_recipes
from vllm_bpd.errors import HeadsError

_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130  # as a shell reports SIGINT

# Each command: its help, and the recipe's sections that it reads.
_COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "all": (
        "generate, train and evaluate; what `bpd-train` alone does",
        ("generate", "train", "evaluate"),
    ),
    "generate": ("prompts and their answers", ("generate",)),
    "train": ("hidden states of the answers, heads, a checkpoint", ("train", "evaluate")),
    "evaluate": ("accuracy and mean accepted block on recorded answers", ("evaluate",)),
    "export": ("a checkpoint of the newest training state, or of other heads", ("train", "export")),
}


class _Parser(argparse.ArgumentParser):
    """Reports bad options as everything else does: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(_EXIT_BAD_INPUT)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Options that are not given leave no trace in the namespace."""
    parser = _Parser(
        prog="bpd-train",
        description="Makes blockwise heads for a target. Without a command: all stages, each of "
        "which goes on where it was stopped; `bpd-train all --help` lists their options.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, (text, sections) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument(
            "--config",
            metavar="RECIPE",
            help=f"recipe file, or the name of one that ships: {', '.join(shipped_recipes())}; "
            "options given beside it win",
        )
        # What other commands write, `evaluate` reads.
        read = name == "evaluate"
        if read:
            command.add_argument(
                "--heads",
                dest="output",
                type=Path,
                metavar="PATH",
                default=argparse.SUPPRESS,
                help=next(option.help for option in TOP if option.name == "output"),
            )
        add_flags(command, [o for o in TOP if not read or o.name != "output"], "places")
        seen: set[str] = set()
        for section in sections:
            options = [option for option in SECTIONS[section] if option.name not in seen]
            seen |= {option.name for option in options}
            add_flags(command, options, f"section {section}")
    return parser


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The recipe that parsed options ask for. Raises HeadsError for bad input."""
    file = RecipeFile() if args.config is None else read_recipe(args.config)
    flags = {name: value for name, value in vars(args).items() if name not in ("command", "config")}
    return make_recipe(file, flags, _COMMANDS[args.command][1])


def run(command: str, recipe: Recipe, command_line: str) -> None:
    """Run one command. Raises HeadsError, before any work, for a target that is not there."""
    from heads_training import pipeline
    from heads_training.evaluate import format_report
    from heads_training.export import export_checkpoint
    from heads_training.target import resolve_target

    resolve_target(recipe.target)
    if command in ("all", "generate"):
        tokens = pipeline.generate_answers(recipe)
        print(f"{recipe.answers_path}: {tokens} answer tokens written")
    if command in ("all", "train"):
        report = pipeline.train_checkpoint(recipe, command_line)
        if report is not None:
            print(format_report(report))
            print(f"{recipe.output}: heads written; {recipe.plot_path}: their evaluation")
    if command == "export":
        print(f"{recipe.output}: exported from {export_checkpoint(recipe, command_line)}")
    if command == "evaluate":
        print(format_report(pipeline.evaluate_checkpoint(recipe)))
        print(f"{recipe.report_path}, {recipe.plot_path}: written")


def _command_line(arguments: Sequence[str]) -> str:
    """The command line, for provenance, with paths cut to their last part."""
    options: list[Option] = [*TOP, *(option for section in SECTIONS.values() for option in section)]
    paths = {"--config", "--target", "--heads", "--teacher", "--dataset"}
    for option in options:
        if option.kind is Path or (option.many and Path in option.kind.__args__):
            paths.add(option.flag)
    words, after_path = ["bpd-train"], False
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            after_path = name in paths
            if after_path and equals:
                word = f"{name}={Path(value).name}"
        elif after_path:
            word = Path(word).name
        words.append(word)
    return shlex.join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 2 for bad input, 130 when interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Options without a command are the whole way; a wrong word is still named as one.
    alone = not given or (given[0].startswith("-") and given[0] not in ("-h", "--help"))
    args = build_parser().parse_args(["all", *given] if alone else given)
    try:
        run(args.command, recipe_from(args), _command_line(given))
    except (HeadsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
