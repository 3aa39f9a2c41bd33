"""`vllm-bpd`: the plugin's own command: `doctor` and `tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_bpd.errors import HeadsError
from vllm_bpd.tune import add_arguments, tune


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-bpd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="versions, model runner, every touched vLLM symbol, heads for a target"
    )
    doctor.add_argument("target", nargs="?", help="model folder or hub id to find heads for")
    doctor.add_argument("--heads", help="folder or hub id of heads, instead of looking for them")
    add_arguments(
        commands.add_parser("tune", help="measure how far drafting pays here, by batch size")
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "tune":
        return _tune(arguments)
    if arguments.heads is not None and arguments.target is None:
        parser.error("--heads: found without a target; give the target they are for, too")
    from vllm_bpd.doctor import examine

    return examine(arguments.target, arguments.heads)


def _tune(arguments: argparse.Namespace) -> int:
    try:
        tune(arguments)
    except HeadsError as error:
        print(f"vllm-bpd tune: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
