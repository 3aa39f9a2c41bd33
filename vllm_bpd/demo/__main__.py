"""Runs the demo: `python -m vllm_bpd.demo`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_bpd.demo.prompts import PROMPTS
from vllm_bpd.errors import HeadsError


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
    except HeadsError as error:
        sys.exit(f"demo: error: {error}")


def run(arguments: argparse.Namespace) -> None:
    """The comparison itself. Raises HeadsError for a target without heads."""
    from vllm_bpd.demo.contender import Contender
    from vllm_bpd.demo.report import Comparison, first_difference, save_picture, show
    from vllm_bpd.demo_target import export_demo_target

    console = Console(record=True, width=100)
    target = arguments.target or str(export_demo_target())
    speculative = {"method": "bpd", **({"model": arguments.heads} if arguments.heads else {})}
    console.print(f"target {Path(target).name}: starting two engines (a minute or two each) ...")
    common = {"max_tokens": arguments.max_tokens, "dtype": arguments.dtype}
    bpd = Contender("bpd", target, speculative_config=speculative, **common)
    plain = Contender("plain", target, **common)
    answers = {"plain": [], "bpd": []}  # type: ignore[var-annotated]
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
    after = bpd.counters()
    margins = {}
    for index, (a, b) in enumerate(zip(answers["plain"], answers["bpd"], strict=True)):
        if a.token_ids != b.token_ids:
            at = first_difference(a.token_ids, b.token_ids)
            margins[index] = plain.margin(PROMPTS[index], a.token_ids[:at])
    result = Comparison(
        PROMPTS,
        tuple(answers["plain"]),
        tuple(answers["bpd"]),
        {name: _minus(after[name], before[name]) for name in after},
        margins,
        arguments.dtype,
    )
    show(result, bpd.llm.get_tokenizer(), console)
    save_picture(console, arguments.output / "demo.svg")
    _save_raw(result, arguments.output / "demo.json")
    console.print(f"picture: {arguments.output / 'demo.svg'}, figures: {arguments.output}/demo.json")
    for contender in (bpd, plain):
        contender.close()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=not console.is_terminal,
    )


def _minus(after: object, before: object) -> object:
    if isinstance(after, list) and isinstance(before, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before  # type: ignore[operator]


def _save_raw(result: object, path: Path) -> None:
    from vllm_bpd.demo.report import Comparison

    assert isinstance(result, Comparison)
    path.write_text(
        json.dumps(
            {
                "vllm": version("vllm"),
                "torch": version("torch"),
                "dtype": result.dtype,
                "tokens_per_second": {
                    "no speculation": result.speed(result.plain),
                    "bpd": result.speed(result.bpd),
                },
                "ratio": result.ratio,
                "mean_accepted_block": result.mean_accepted_block,
                "acceptance_by_position": result.acceptance_by_position,
                "identical": result.identical,
                "prompts": len(result.prompts),
                "margins": result.margins,
                "blocks": [a.blocks for a in result.bpd],
            },
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
