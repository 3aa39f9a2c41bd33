"""Mean accepted block against the answer tokens that heads were trained on.

Trains heads by one recipe on the first answer files that hold so many tokens, for several such
numbers, and walks the answers of `--judge` with each. Every size is passed over `--epochs` times,
and no fewer steps are made than the recipe says. Prints a table in Markdown and writes the figures
as JSON and a picture. What is finished stays in `--work`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import replace
from typing import Any

from benchmarks.drafters import write_figures
from benchmarks.trials import (
    JUDGED,
    Ground,
    Trial,
    add_arguments,
    answer_tokens,
    draw,
    read_config,
    read_ground,
    require_k,
    run_trials,
)
from heads_training.train import TrainConfig
from vllm_bpd.arguments import at_least_one, positive, run_command
from vllm_bpd.errors import HeadsError


def main() -> None:
    """Train, judge, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--tokens", type=at_least_one, nargs="+", help="answer tokens (default: halvings)"
    )
    parser.add_argument("--epochs", type=positive, default=2.8, help="passes over the tokens")
    parser.add_argument("--k", type=int, default=5, help="block size of table and picture")
    arguments = parser.parse_args()
    config = read_config(arguments)
    require_k(arguments.k, max(config.lattice_places, config.num_draft_heads))
    ground = read_ground(arguments, config)
    trials = sizes(ground, config, arguments.tokens, arguments.epochs)
    rows = []
    for _, figures in run_trials(ground, trials):
        rows.append(figures)
        print(as_markdown(rows, str(arguments.k)), flush=True)
    if arguments.output:
        results = {"k": arguments.k, "epochs": arguments.epochs, "rows": rows}
        write_figures(arguments.output, "python -m benchmarks.learning_curve", results, arguments)
        along = [row["trained_tokens"] for row in rows]
        picture = arguments.output.with_suffix(".svg")
        draw(picture, "answer tokens trained on", along, rows, str(arguments.k))


def sizes(
    ground: Ground, config: TrainConfig, tokens: list[int] | None, epochs: float
) -> list[Trial]:
    """A trial for each number of answer tokens, fewest first; without any, for all and halvings.

    Raises HeadsError for a number that the answers do not hold.
    """
    held = list(itertools.accumulate(answer_tokens(shard) for shard in ground.shards))
    wanted = sorted(tokens or [math.ceil(held[-1] / 2**i) for i in range(4)])
    trials = []
    for number in wanted:
        if number > held[-1]:
            raise HeadsError(f"tokens: found {number}; the answers hold {held[-1]}")
        count = next(i for i, so_far in enumerate(held, 1) if so_far >= number)
        steps = max(config.steps, math.ceil(epochs * held[count - 1] / config.batch_size))
        trials.append(
            Trial(f"tokens-{number}", replace(config, steps=steps), ground.shards[:count])
        )
    return trials


def as_markdown(rows: list[dict[str, Any]], k: str) -> str:
    """Tokens a step at `k` for every size, all answers and by category."""
    groups = list(rows[0]["drafters"][JUDGED[0]])
    lines = ["", f"Tokens a step, k = {k}:", "", "| answer tokens | steps | drafter | "]
    lines[-1] += " | ".join(groups) + " |"
    lines.append("|---" * (len(groups) + 3) + "|")
    for row in rows:
        for name in JUDGED:
            cells = (
                f"{row['drafters'][name][group][k]['tokens_per_step']:.3f}" for group in groups
            )
            lines.append(
                f"| {row['trained_tokens']:,} | {row['steps']:,} | {name} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
