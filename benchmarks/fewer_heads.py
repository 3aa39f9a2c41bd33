"""What the later heads add beside the request's own text, offline.

The lattice's weights are fitted anew for the first head alone, the first two, and so on, to answers
that the heads were not trained on; each is then walked over other answers, for every k. Prints
tokens a step at the largest k, and writes the figures of all as JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafters import Variant, measure, write_figures
from heads_training.dataset import Texts, read_texts
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import Lattice, draft_rows, fit_weights, make_lattice
from heads_training.target import read_rows
from vllm_bpd.arguments import at_least_one, output_file, run_command
from vllm_bpd.checkpoint import load_heads

CUTS = (0.0, 0.1)


def main() -> None:
    """Fit, walk, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fewer_heads", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--target", required=True, help="model folder")
    parser.add_argument("--heads", required=True, type=Path, help="folder of heads")
    parser.add_argument("--fit-on", required=True, type=Path, help="folder of answers, or a file")
    parser.add_argument("--answers", required=True, type=Path, help="folder of answers, or a file")
    parser.add_argument(
        "--places", type=at_least_one, default=8, help="of the lattice, k - 1 at most"
    )
    parser.add_argument("--work", type=Path, default=Path("bpd-work"), help="for hidden states")
    parser.add_argument("--output", type=output_file, help="JSON file")
    arguments = parser.parse_args()
    _, fitted_on = candidates(arguments, arguments.fit_on, "fitted")
    texts, walked = candidates(arguments, arguments.answers, "evaluated")
    results = measure(variants(fitted_on, walked, arguments.places), texts)
    results["fit_tokens"] = len(fitted_on.right_TP)
    k = str(arguments.places + 1)
    for name, rows in results["drafters"].items():
        print(f"{name}: {rows['all'][k]['tokens_per_step']:.3f} tokens a step, k = {k}")
    if arguments.output:
        write_figures(arguments.output, "python -m benchmarks.fewer_heads", results, arguments)


def candidates(arguments: argparse.Namespace, answers: Path, name: str) -> tuple[Texts, Lattice]:
    """The answers, and what heads and text suggest at every row of them."""
    heads, draft_ids_V = load_heads(arguments.heads, torch.bfloat16)
    shards = write_states(arguments.target, answers, arguments.work / name)
    texts = read_texts(shards, heads.num_heads)
    target = read_rows(arguments.target)
    rows_T = torch.arange(texts.rows)
    return texts, make_lattice(heads, texts, rows_T, target, draft_ids_V, arguments.places)


def variants(fitted_on: Lattice, walked: Lattice, places: int) -> dict[str, Variant]:
    """A drafter for each number of heads and each cut."""
    found: dict[str, Any] = {}
    for count in range(1, walked.head_ids_TKM.shape[1] + 1):
        weights_PF = fit_weights(first_heads(fitted_on, count), places)
        drafted = draft_rows(first_heads(walked, count), weights_PF)
        for cut in CUTS:
            found[f"heads {count}, cut {cut}"] = Variant(drafted, cut)
    return found


def first_heads(rows: Lattice, count: int) -> Lattice:
    """The same rows as if there were `count` heads."""
    return replace(
        rows,
        head_ids_TKM=rows.head_ids_TKM[:, :count],
        head_logp_TKM=rows.head_logp_TKM[:, :count],
    )


if __name__ == "__main__":
    run_command(main)
