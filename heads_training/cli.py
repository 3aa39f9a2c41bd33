"""`bpd-train`: answers from the target, hidden states, training, evaluation.

Options mirror the fields of `GenerateConfig` and `TrainConfig`; their help is the fields' own.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from heads_training.generate import GenerateConfig, generate
from heads_training.train import TrainConfig
from vllm_bpd.errors import HeadsError

_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
_PATH_OPTIONS = ("--target", "--output", "--answers", "--work", "--prompts", "--heads", "--json")


class _Parser(argparse.ArgumentParser):
    """Reports bad options as everything else does: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(_EXIT_BAD_INPUT)


def add_fields(parser: argparse.ArgumentParser, record: type, skip: Sequence[str] = ()) -> None:
    """One option for each field of the dataclass `record`, named and typed as it is.

    Fields are `Annotated[type, help]`; type is str, int, float, bool, Path, a Literal of strings
    or a tuple of Paths.
    """
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        if field.name in skip:
            continue
        assert get_origin(hints[field.name]) is Annotated, field.name
        kind, text = get_args(hints[field.name])
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        if field.default is MISSING:
            options["required"] = True
        else:
            options["default"] = field.default
            options["help"] += " (default: %(default)s)"
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif get_origin(kind) is tuple:
            options |= {"type": get_args(kind)[0], "nargs": "+"}
        else:
            options["type"] = kind
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def from_args(record: type, args: argparse.Namespace, **given: Any) -> Any:
    """The dataclass `record` from parsed options; `given` fields first."""
    values = {f.name: getattr(args, f.name) for f in fields(record) if hasattr(args, f.name)}
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    return record(**{**values, **given})


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="bpd-train", description="Makes blockwise heads for a target.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    command = commands.add_parser("generate", help="prompts and greedy answers by the target")
    add_fields(command, GenerateConfig)
    command.set_defaults(run=_run_generate)

    command = commands.add_parser("answers", help="greedy answers to given prompts only")
    add_fields(command, GenerateConfig, skip=("self_written",))
    command.set_defaults(run=_run_generate, self_written=0)

    command = commands.add_parser("train", help="hidden states of answers, heads, a checkpoint")
    _add_target(command)
    _add_path(command, "answers", "answer file, or folder of them", required=True)
    _add_path(command, "output", "folder of the heads' checkpoint", required=True)
    _add_path(command, "work", "folder of hidden states, training state and log", "bpd-work")
    add_fields(command, TrainConfig)
    command.set_defaults(run=_run_train)

    command = commands.add_parser("evaluate", help="mean accepted block on recorded answers")
    _add_path(command, "heads", "folder of the heads' checkpoint", required=True)
    _add_target(command)
    _add_path(command, "answers", "answer file, or folder of them", required=True)
    _add_path(command, "work", "folder of hidden states", "bpd-work")
    _add_path(command, "json", "file that receives the report")
    command.set_defaults(run=_run_evaluate)

    command = commands.add_parser("all", help="generate, train and evaluate on held-out answers")
    _add_path(command, "work", "folder of answers, hidden states and training", "bpd-work")
    _add_path(command, "output", "folder of the heads' checkpoint", required=True)
    add_fields(command, GenerateConfig, skip=("output", "worker", "workers", "seed"))
    add_fields(command, TrainConfig)
    command.set_defaults(run=_run_all)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="model folder or hub id")


def _add_path(
    parser: argparse.ArgumentParser,
    name: str,
    text: str,
    default: str | None = None,
    required: bool = False,
) -> None:
    parser.add_argument(
        f"--{name}",
        type=Path,
        required=required,
        default=None if default is None else Path(default),
        help=text + ("" if default is None else " (default: %(default)s)"),
    )


def _run_generate(args: argparse.Namespace) -> None:
    config = from_args(GenerateConfig, args)
    print(f"{config.output}: {generate(config)} answer tokens written")


def _run_train(args: argparse.Namespace) -> None:
    from heads_training.pipeline import train_checkpoint

    config = from_args(TrainConfig, args)
    report = train_checkpoint(
        config, args.target, args.answers, args.work, args.output, args.command_line
    )
    _print_report(report)
    print(f"{args.output}: heads written")


def _run_evaluate(args: argparse.Namespace) -> None:
    from heads_training.evaluate import evaluate, write_json

    report = evaluate(args.heads, args.target, args.answers, args.work / "evaluated")
    _print_report(report)
    if args.json is not None:
        write_json(args.json, report)


def _run_all(args: argparse.Namespace) -> None:
    from heads_training.target import resolve_target

    resolve_target(args.target)
    args.answers = args.work / "answers"
    generate(from_args(GenerateConfig, args, output=args.answers))
    _run_train(args)


def _print_report(report: dict[str, Any]) -> None:
    from heads_training.walk import format_table

    print(format_table(report))


def _command_line(arguments: Sequence[str]) -> str:
    """The command line, for provenance, with paths cut to their last part."""
    words, after_path = ["bpd-train"], False
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            after_path = name in _PATH_OPTIONS
            if after_path and equals:
                word = f"{name}={Path(value).name}"
        elif after_path:
            word = Path(word).name
        words.append(word)
    return shlex.join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 2 for bad input, 130 when interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    words = sys.argv[1:] if arguments is None else arguments
    args = build_parser().parse_args(words)
    args.command_line = _command_line(words)
    try:
        args.run(args)
    except (HeadsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
