"""Acceptance and cost of drafting against the size of the draft vocabulary.

The same heads score the most frequent ids of the training answers, fewer or more of them; the
lattice's weights are fitted anew to held-out training answers, and the answers of `--judge` are
walked. Heads that were trained on few ids are at a disadvantage with more. Cost: heads, vocabulary
products and the best candidates for one row, on this machine, relative to the whole vocabulary.
Prints a table in Markdown and writes the figures as JSON and a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.drafters import measure, variants, write_figures
from benchmarks.trials import JUDGED, draw, require_k
from heads_training.dataset import Texts, coverage, draft_vocabulary, read_texts, split_held_out
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import Lattice, fit_weights, head_candidates, make_lattice
from heads_training.target import TargetRows, read_rows
from vllm_bpd.arguments import at_least_one, output_file, run_command
from vllm_bpd.checkpoint import load_heads
from vllm_bpd.heads import BlockwiseHeads
from vllm_bpd.lattice import CANDIDATES

SIZES = (2048, 4096, 8192, 16384, 32768, 0)  # 0: the whole vocabulary
_VALIDATION = 0.05  # share of the training prompts that the lattice is fitted to
_SECONDS = 2.0  # of measuring a size's cost


@dataclass(frozen=True)
class Side:
    """Whole answers, and what the request's own text suggests at every row of them."""

    texts: Texts
    rows_T: Tensor
    lattice: Lattice


def main() -> None:
    """Fit, walk, time, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="model folder")
    parser.add_argument("--heads", required=True, type=Path, help="folder of heads")
    parser.add_argument("--answers", required=True, type=Path, help="training answers")
    parser.add_argument("--judge", required=True, type=Path, help="answers to judge on")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ids; 0: all")
    parser.add_argument(
        "--places", type=at_least_one, default=8, help="of the lattice, k - 1 at most"
    )
    parser.add_argument("--k", type=int, default=5, help="block size of table and picture")
    parser.add_argument("--work", type=Path, default=Path("bpd-work"), help="for hidden states")
    parser.add_argument("--output", type=output_file, help="JSON file; a picture lies beside it")
    arguments = parser.parse_args()
    require_k(arguments.k, arguments.places)
    found = run(arguments)
    print(as_markdown(found, str(arguments.k)))
    if arguments.output:
        results = {"k": arguments.k, "sizes": found}
        write_figures(arguments.output, "python -m benchmarks.draft_vocabulary", results, arguments)
        along = [row["scored ids"] for row in found]
        picture = arguments.output.with_suffix(".svg")
        draw(picture, "scored ids", along, found, str(arguments.k))


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures for every size, in the order given."""
    heads, _ = load_heads(arguments.heads, torch.bfloat16)
    target = read_rows(arguments.target)

    def side(answers: Path, name: str, choose: Callable[[Texts], Tensor]) -> Side:
        shards = write_states(arguments.target, answers, arguments.work / name)
        texts = read_texts(shards, heads.num_heads)
        rows_T = choose(texts)
        # Which ids the heads score is put in later; the matches stay.
        made = make_lattice(heads, texts, rows_T, target, torch.arange(1), arguments.places)
        return Side(texts, rows_T, made)

    fitted = side(arguments.answers, "states", lambda t: split_held_out(t, _VALIDATION)[0])
    judged = side(arguments.judge, "judged", lambda t: torch.arange(t.rows))
    found = []
    for size in arguments.sizes:
        ids_V = None
        if 0 < size < target.fingerprint.vocab_size:
            vocab_size = target.fingerprint.vocab_size
            ids_V = draft_vocabulary(fitted.texts.sampled_T, size, vocab_size)
        figures = judge(heads, target, ids_V, fitted, judged)
        figures["seconds"] = cost(heads, target, ids_V)
        found.append(figures)
    whole = cost(heads, target, None)
    for figures in found:
        figures["cost"] = round(figures.pop("seconds") / whole, 3)
    return found


def judge(
    heads: BlockwiseHeads, target: TargetRows, ids_V: Tensor | None, fitted: Side, judged: Side
) -> dict[str, Any]:
    """Acceptance with the scored ids `ids_V`, int64 [V]; None: all."""
    places = judged.lattice.right_TP.shape[1]

    def scored(side: Side) -> Lattice:
        ids_TKM, logp_TKM = head_candidates(heads, side.texts, side.rows_T, target, ids_V)
        return replace(side.lattice, head_ids_TKM=ids_TKM, head_logp_TKM=logp_TKM)

    found = variants(scored(judged), fit_weights(scored(fitted), places))
    covered = 1.0 if ids_V is None else coverage(judged.texts.sampled_T, ids_V)
    return {
        "scored ids": target.fingerprint.vocab_size if ids_V is None else len(ids_V),
        "share of the judged tokens": round(covered, 4),
        **measure({name: found[name] for name in JUDGED}, judged.texts),
    }


@torch.inference_mode()
def cost(heads: BlockwiseHeads, target: TargetRows, ids_V: Tensor | None) -> float:
    """Seconds for one row: heads, products with the scored ids, best candidates; the median."""
    head_WD = target.lm_head_VD.to(torch.bfloat16)
    head_VD = head_WD if ids_V is None else head_WD[ids_V]
    hidden_1D = torch.randn(1, head_VD.shape[1]).to(torch.bfloat16)
    embedding_1D = hidden_1D if heads.config.conditioning == "sampled_token" else None

    def draft() -> Tensor:
        logits_KV = heads(hidden_1D, embedding_1D)[0] @ head_VD.T
        best_KM: Tensor = logits_KV.topk(min(CANDIDATES, head_VD.shape[0])).indices
        return best_KM

    timer = Timer("draft()", globals={"draft": draft}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_SECONDS).median)


def as_markdown(found: list[dict[str, Any]], k: str) -> str:
    """A row for every size."""
    lines = [f"Tokens a step, k = {k}; cost: of drafting one row, of the whole vocabulary's.", ""]
    lines.append("| scored ids | share of the tokens | cost | " + " | ".join(JUDGED) + " |")
    lines.append("|---" * (len(JUDGED) + 3) + "|")
    for row in found:
        steps = (row["drafters"][name]["all"][k]["tokens_per_step"] for name in JUDGED)
        lines.append(
            f"| {row['scored ids']:,} | {row['share of the judged tokens']:.1%} "
            f"| {row['cost']:.2f} | " + " | ".join(f"{value:.3f}" for value in steps) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
