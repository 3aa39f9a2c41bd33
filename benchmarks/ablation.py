"""What each choice about heads is worth: trained alike on the same answers, one thing changed.

Stern's heads as the paper has them, each further step alone, then all of them together as the
recipe has them, and from there other shapes. Walks the answers of `--judge` with each, as heads
alone and in the lattice. Prints tables in Markdown and writes the figures as JSON. What is finished
stays in `--work`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.drafters import write_figures
from benchmarks.trials import JUDGED, Trial, add_arguments, read_config, read_ground, run_trials
from heads_training.train import TrainConfig
from vllm_bpd.arguments import at_least_one, run_command
from vllm_bpd.errors import HeadsError

# The paper's heads (arXiv 1811.03115): they read the hidden state alone, towards the target's
# tokens, one of the losses drawn each step.
PLAIN: dict[str, Any] = {"conditioning": "none", "distillation": 0.0, "head_loss": "random"}
STEPS: dict[str, tuple[str, ...]] = {  # fields that take the recipe's value
    "token just sampled": ("conditioning",),
    "target's probabilities": ("distillation",),
    "all losses, weighted": ("head_loss",),
}


def main() -> None:
    """Train, judge, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--steps", type=at_least_one, help="optimiser steps (default: the recipe's)"
    )
    parser.add_argument("--only", nargs="+", help="names of trials (default: all)")
    arguments = parser.parse_args()
    config = read_config(arguments)
    if arguments.steps:
        config = replace(config, steps=arguments.steps)
    configs = chosen(make_configs(config), arguments.only)
    ground = read_ground(arguments, config)
    trials = [Trial(name, config, ground.shards) for name, config in configs.items()]
    found = {}
    for trial, figures in run_trials(ground, trials):
        found[trial.name] = figures
        print(as_markdown(found), flush=True)
    if arguments.output:
        write_figures(
            arguments.output, "python -m benchmarks.ablation", {"trials": found}, arguments
        )


def make_configs(config: TrainConfig) -> dict[str, TrainConfig]:
    """Of every trial, named by what differs from the paper's heads or, behind "all, ", from all."""
    plain = replace(config, **PLAIN)
    configs = {"plain": plain}
    for name, fields in STEPS.items():
        configs[name] = replace(plain, **{field: getattr(config, field) for field in fields})
    configs["all"] = config
    heads, hidden = config.num_draft_heads, config.head_hidden_size
    configs |= {
        "all, half as wide": replace(config, head_hidden_size=hidden // 2),
        "all, twice as wide": replace(config, head_hidden_size=2 * hidden),
        "all, relu": replace(config, activation="relu"),
        "all, answers alone": replace(config, prompt_rows=False),
        "all, hard labels": replace(config, distillation=0.0),
        "all, soft labels only": replace(config, distillation=1.0),
    }
    if heads > 2:
        # Weights: hidden units x (inputs + heads) x the target's hidden size.
        inputs = 1 if config.conditioning == "none" else 2
        wider = heads * hidden * (inputs + heads) // (2 * (inputs + 2))
        configs["all, two heads of the same size"] = replace(
            config, num_draft_heads=2, head_hidden_size=wider
        )
    return configs


def chosen(configs: dict[str, TrainConfig], names: list[str] | None) -> dict[str, TrainConfig]:
    """Those of these names, in their own order. Raises HeadsError for one that is none."""
    for name in names or ():
        if name not in configs:
            raise HeadsError(
                f"only: found {name!r}; expected some of {', '.join(map(repr, configs))}"
            )
    return {name: config for name, config in configs.items() if not names or name in names}


def as_markdown(found: dict[str, Any]) -> str:
    """Tokens a step for every trial and k, a table for each way to draft."""
    lines = []
    for drafter in JUDGED:
        sizes = list(next(iter(found.values()))["drafters"][drafter]["all"])
        lines += ["", f"Tokens a step, {drafter}:", ""]
        lines.append("| trial | MB | " + " | ".join(f"k = {k}" for k in sizes) + " |")
        lines.append("|---" * (len(sizes) + 2) + "|")
        for name, figures in found.items():
            rows = figures["drafters"][drafter]["all"]
            cells = " | ".join(f"{rows[k]['tokens_per_step']:.3f}" for k in sizes)
            lines.append(f"| {name} | {figures['checkpoint_bytes'] / 1e6:.1f} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
