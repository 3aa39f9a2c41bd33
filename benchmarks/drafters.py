"""What each step of drafting adds, offline: heads, lookup, and both in one lattice.

Walks recorded greedy answers of the target, each drafter in turn, for every k:

    heads            each head's first choice
    lookup           what followed the longest, latest match in the request's own text
    lookup or heads  lookup where anything matches, the heads' choice elsewhere
    lattice          heads and text scored together, as served (docs/acceptance.md)
    lattice, cut C   the same, a draft ended where confidence falls below C
    text, cut C      the text alone under the lattice's weights, ended alike
    ngram, suffix    the engine's own drafters that need no second model (benchmarks.peers)

The lattice is also cut to the verified tokens of each of the engine's drafters, by category. Prints
the tables in Markdown and writes the figures as JSON and a picture. The answers are those that
`bpd-train generate` writes.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import always, at_equal_cost, peers
from heads_training.dataset import Texts, read_texts
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import Drafted, Lattice, draft_rows, make_lattice
from heads_training.lattice_walk import walk_drafts
from heads_training.target import read_rows
from vllm_bpd.arguments import output_file, run_command
from vllm_bpd.checkpoint import load_heads, load_lattice
from vllm_bpd.errors import HeadsError
from vllm_bpd.lattice import draft_block

CUTS = (0.1, 0.2, 0.3, 0.5, 0.7)
_SAMPLED_BLOCKS = 2048  # rows whose whole blocks are drafted, to count repetitions
_WINDOW = 1024  # tokens of text they see


@dataclass(frozen=True)
class Variant:
    """One way to draft, at every row and place, and where it stops."""

    drafted: Drafted
    min_confidence: float = 0.0


def main() -> None:
    """Walk, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="model folder")
    parser.add_argument("--heads", required=True, type=Path, help="folder of heads with a lattice")
    parser.add_argument("--answers", required=True, type=Path, help="folder of answers, or a file")
    parser.add_argument("--work", type=Path, default=Path("bpd-work"), help="for hidden states")
    parser.add_argument("--output", type=output_file, help="JSON file; the picture lies beside it")
    arguments = parser.parse_args()
    heads, draft_ids_V = load_heads(arguments.heads, torch.bfloat16)
    weights_PF = load_lattice(arguments.heads)
    if weights_PF is None:
        raise HeadsError(f"heads: {arguments.heads}: found no lattice; expected one to compare")
    shards = write_states(arguments.target, arguments.answers, arguments.work / "evaluated")
    texts = read_texts(shards, heads.num_heads)
    rows_T = torch.arange(texts.rows)
    rows = make_lattice(
        heads, texts, rows_T, read_rows(arguments.target), draft_ids_V, len(weights_PF)
    )
    found = variants(rows, weights_PF)
    others = peers(texts, rows.right_TP)
    results = measure(found | {name: Variant(drafted) for name, drafted in others.items()}, texts)
    results["at equal cost"] = against_peers(found["lattice"].drafted, others, texts)
    results["repeated"] = repeated(rows, texts, weights_PF)
    print(as_markdown(results))
    if arguments.output:
        write_results(arguments.output, results, arguments)


def variants(rows: Lattice, weights_PF: Tensor) -> dict[str, Variant]:
    """Every drafter over `rows`."""
    heads, places = rows.head_ids_TKM.shape[1], len(weights_PF)
    length = len(rows.right_TP)
    head_ids, text_ids = [], []
    for place in range(places):
        seen_T = (torch.arange(length) + place).clamp(max=length - 1)
        text_ids.append(rows.match_ids_TR[seen_T, 0])
        missing_T = torch.full((length,), -1)
        head_ids.append(rows.head_ids_TKM[:, place, 0] if place < heads else missing_T)
    heads_TP, text_TP = torch.stack(head_ids, 1), torch.stack(text_ids, 1)
    no_text_TP = torch.zeros_like(heads_TP, dtype=torch.bool)
    lattice = draft_rows(rows, weights_PF)
    # As where the heads rest (`heads_up_to_batch_size`).
    no_heads = replace(rows, head_ids_TKM=torch.full_like(rows.head_ids_TKM, -1))
    text = draft_rows(no_heads, weights_PF)
    return {
        "heads": Variant(always(heads_TP, rows.right_TP, no_text_TP)),
        "lookup": Variant(always(text_TP, rows.right_TP)),
        "lookup or heads": Variant(
            always(torch.where(text_TP >= 0, text_TP, heads_TP), rows.right_TP, text_TP >= 0)
        ),
        "lattice": Variant(lattice),
        **{f"lattice, cut {cut}": Variant(lattice, cut) for cut in CUTS},
        **{f"text, cut {cut}": Variant(text, cut) for cut in CUTS},
    }


def against_peers(ours: Drafted, others: dict[str, Drafted], texts: Texts) -> dict[str, Any]:
    """Ours and each peer at equal verified tokens: by peer, k and category."""
    groups, largest = categories(texts), ours.match_TP.shape[1] + 1
    return {
        name: {
            str(k): {
                group: at_equal_cost(ours.at(rows_T), theirs.at(rows_T), lengths, k - 1)
                for group, (rows_T, lengths) in groups.items()
            }
            for k in sorted({min(5, largest), largest})
        }
        for name, theirs in others.items()
    }


def categories(texts: Texts) -> dict[str, tuple[Tensor, list[int]]]:
    """The rows (bool) and answers' lengths of all, and of each category."""
    lengths_R, names = texts.answer_lengths_R, [source.split(":")[0] for source in texts.sources]
    inside = {"all": torch.ones(len(names), dtype=torch.bool)}
    inside |= {group: torch.tensor([n == group for n in names]) for group in sorted(set(names))}
    return {
        group: (inside_R.repeat_interleave(lengths_R), lengths_R[inside_R].tolist())
        for group, inside_R in inside.items()
    }


def measure(found: dict[str, Variant], texts: Texts) -> dict[str, Any]:
    """Figures for every drafter: by k, and by category for every k."""
    places = next(iter(found.values())).drafted.match_TP.shape[1]
    by_variant = {
        name: {
            group: _by_k(replace(variant, drafted=variant.drafted.at(rows_T)), lengths, places)
            for group, (rows_T, lengths) in categories(texts).items()
        }
        for name, variant in found.items()
    }
    return {"answers": len(texts.sources), "answer_tokens": texts.rows, "drafters": by_variant}


def _by_k(variant: Variant, lengths: list[int], places: int) -> dict[str, Any]:
    return {
        str(k + 1): walk_drafts(variant.drafted, lengths, k, variant.min_confidence).report()
        for k in range(1, places + 1)
    }


def repeated(rows: Lattice, texts: Texts, weights_PF: Tensor) -> dict[str, float]:
    """Share of neighbouring drafts, 0..1, that are the same token: heads, lattice, the answers.

    Heads that do not see each other's choice say a likely word twice.
    """
    heads = rows.head_ids_TKM.shape[1]
    step = max(texts.rows // _SAMPLED_BLOCKS, 1)
    rows_B = torch.arange(0, texts.rows, step)
    window_BW = torch.stack([_window(texts, int(row)) for row in rows_B])
    block = draft_block(
        window_BW, rows.head_ids_TKM[rows_B], rows.head_logp_TKM[rows_B], weights_PF[:heads]
    )
    first_BK, right_BK = rows.head_ids_TKM[rows_B, :, 0], rows.right_TP[rows_B, :heads]
    return {
        name: round(float((ids[:, 1:] == ids[:, :-1]).float().mean()), 4)
        for name, ids in (("heads", first_BK), ("lattice", block.ids_BP), ("answers", right_BK))
    }


def _window(texts: Texts, row: int) -> Tensor:
    """int64 [W]: the text up to the token that `row` samples, -1 before its beginning."""
    record = int(texts.record_T[row])
    ids_N = texts.ids[record].long()
    prompt = len(ids_N) - int(texts.answer_lengths_R[record])
    seen_N = ids_N[: prompt + row - int(texts.first_rows[record]) + 1][-_WINDOW:]
    return torch.nn.functional.pad(seen_N, (_WINDOW - len(seen_N), 0), value=-1)


def as_markdown(results: dict[str, Any]) -> str:
    """Tokens a step for every drafter and k; then by category at k = 5 and the largest k."""
    drafters = results["drafters"]
    sizes = list(next(iter(drafters.values()))["all"])
    lines = [f"Tokens a step, {results['answers']} answers of {results['answer_tokens']} tokens:"]
    lines += ["", "| drafter | " + " | ".join(f"k = {k}" for k in sizes) + " |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for name, rows in drafters.items():
        cells = " | ".join(f"{rows['all'][k]['tokens_per_step']:.3f}" for k in sizes)
        lines.append(f"| {name} | {cells} |")
    for k in dict.fromkeys(("5" if "5" in sizes else sizes[-1], sizes[-1])):
        groups = [group for group in next(iter(drafters.values())) if group != "all"]
        lines += ["", f"k = {k}; accepted: share of the drafted tokens that is accepted", ""]
        lines.append("| drafter | all | " + " | ".join(groups) + " | drafted a step | accepted |")
        lines.append("|---" * (len(groups) + 4) + "|")
        for name, rows in drafters.items():
            cells = " | ".join(
                f"{rows[group][k]['tokens_per_step']:.2f}" for group in ("all", *groups)
            )
            row = rows["all"][k]
            lines.append(
                f"| {name} | {cells} | {row['drafts_per_step']:.2f} | "
                f"{row['accepted_per_draft']:.2f} |"
            )
    lines += equal_cost_markdown(results["at equal cost"])
    shares = ", ".join(f"{name} {share:.1%}" for name, share in results["repeated"].items())
    return "\n".join([*lines, "", f"Neighbouring tokens that are the same: {shares}."])


def equal_cost_markdown(found: dict[str, Any]) -> list[str]:
    """A table a peer: the peer's and the lattice's tokens a step, at no more verified tokens."""
    lines = []
    for name, by_k in found.items():
        groups = list(next(iter(by_k.values())))
        lines += ["", f"lattice against {name}, at no more verified tokens: tokens a step", ""]
        lines.append("| k | drafter | " + " | ".join(groups) + " | drafted a step | accepted |")
        lines.append("|---" * (len(groups) + 4) + "|")
        for k, by_group in by_k.items():
            for side, label in (("peer", name), ("lattice", "lattice")):
                cells = " | ".join(f"{by_group[g][side]['tokens_per_step']:.2f}" for g in groups)
                whole = by_group["all"][side]
                lines.append(
                    f"| {k} | {label} | {cells} | {whole['drafts_per_step']:.2f} | "
                    f"{whole['accepted_per_draft']:.2f} |"
                )
    return lines


def write_figures(
    path: Path, command: str, results: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """The figures as JSON, with what made them: of paths that were given, the last part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {name: vars(arguments).get(name) for name in ("target", "heads", "answers", "judge")}
    made_by: dict[str, Any] = {
        "command": command,
        **{name: Path(value).name for name, value in given.items() if value is not None},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-bpd")},
    }
    path.write_text(json.dumps(made_by | results, indent=2) + "\n", encoding="utf-8")


def write_results(path: Path, results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The figures with what made them, and a picture beside them."""
    from matplotlib.figure import Figure

    write_figures(path, "python -m benchmarks.drafters", results, arguments)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in results["drafters"].items():
        sizes = [int(k) for k in rows["all"]]
        axes.plot(
            sizes, [row["tokens_per_step"] for row in rows["all"].values()], marker="o", label=name
        )
    axes.set(title="tokens a step", xlabel="k", ylim=(1, None))
    axes.legend()
    figure.savefig(path.with_suffix(".svg"))


if __name__ == "__main__":
    run_command(main)
