"""Runs the demo: `python -m vllm_bpd.demo`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_bpd.demo.prompts import PROMPTS
from vllm_bpd.demo_target import DemoTargetError
from vllm_bpd.errors import HeadsError

if TYPE_CHECKING:  # they import vLLM, which reads VLLM_LOGGING_LEVEL when imported
    from vllm_bpd.demo.contender import Answer, Contender
    from vllm_bpd.demo.report import Comparison


def main() -> None:
    """Compare, show, and save the picture and the raw figures."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--target", help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", help="folder or hub id of heads (default: found for target)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer, tokens")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="for results")
    arguments = parser.parse_args()
    # Warnings and errors of the engines stay; their start-up chatter would bury the comparison.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.getLogger("vllm").setLevel(logging.WARNING)
    try:
        run(arguments)
    except (HeadsError, DemoTargetError) as error:
        sys.exit(f"demo: error: {error}")


def run(arguments: argparse.Namespace) -> None:
    """The comparison itself. Raises HeadsError for a target without heads, or a bad output."""
    from vllm_bpd.demo.contender import Contender
    from vllm_bpd.demo.report import save, show
    from vllm_bpd.demo_target import export_demo_target

    make_folder(arguments.output)
    console = Console(record=True, width=100, highlight=False)
    target = arguments.target or str(export_demo_target())
    speculative = {"method": "bpd", **({"model": arguments.heads} if arguments.heads else {})}
    console.print(f"target {Path(target).name}: starting two engines (a minute or two each) ...")
    common = {"max_tokens": arguments.max_tokens, "dtype": arguments.dtype}
    # In this order: an engine takes the metrics of those before it out of the registry.
    plain = Contender("no speculation", target, **common)
    bpd = Contender("bpd", target, speculative_config=speculative, **common)
    result = compare(plain, bpd, arguments.dtype, console)
    show(result, bpd.llm.get_tokenizer(), console)
    save(result, console, arguments.output)
    print(f"picture: {arguments.output}/demo.svg, figures: {arguments.output}/demo.json")
    for contender in (bpd, plain):
        contender.close()


def make_folder(folder: Path) -> None:
    """Now, not after minutes of answers. Raises HeadsError if there can be no such folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadsError(
            f"output: found {folder}, which cannot be made a folder ({error.strerror}); expected "
            "the path of one, new or not"
        ) from None


def compare(plain: Contender, bpd: Contender, dtype: str, console: Console) -> Comparison:
    """Both contenders answer every prompt, taking turns; differing answers get their margin."""
    from vllm_bpd.demo.report import Comparison, first_difference

    answers: dict[str, list[Answer]] = {plain.name: [], bpd.name: []}
    for contender in (plain, bpd):  # first requests pay for lazy set-up: not counted
        contender.answer("Hello!")
    before = bpd.counters()
    with _progress(console) as progress:
        task = progress.add_task("prompts, each with both engines", total=len(PROMPTS))
        for index, prompt in enumerate(PROMPTS):
            # Who goes first alternates, so that neither always finds the machine warmed up.
            for contender in (plain, bpd) if index % 2 else (bpd, plain):
                answers[contender.name].append(contender.answer(prompt))
            progress.advance(task)
            if not console.is_terminal:  # a bar shows nothing in a log
                print(f"prompt {index + 1} of {len(PROMPTS)} answered", flush=True)
    after = bpd.counters()
    margins = {}
    pairs = zip(answers[plain.name], answers[bpd.name], strict=True)
    for index, (a, b) in enumerate(pairs):
        if a.token_ids != b.token_ids:
            at = first_difference(a.token_ids, b.token_ids)
            margins[index] = plain.margin(PROMPTS[index], a.token_ids[:at])
    return Comparison(
        prompts=PROMPTS,
        plain=tuple(answers[plain.name]),
        bpd=tuple(answers[bpd.name]),
        counters={name: _minus(after[name], before[name]) for name in after},
        margins=margins,
        dtype=dtype,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=not console.is_terminal,
    )


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before


if __name__ == "__main__":
    main()
