"""The exact walk with the request's own text beside the heads: figures for every k and threshold.

As `heads_training.walk`, and a draft may end early, or be empty: where confidence falls below a
threshold, or where neither heads nor text suggest anything. vLLM counts a step without drafts as
no draft, so k-hat = 1 + accepted / drafts speaks of the others; tokens per step, of all.

Shape suffixes: T rows (answer tokens), P places of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads_training.dataset import Texts
from heads_training.lattice_fit import Drafted
from heads_training.walk import WalkCounts

THRESHOLDS = (0.0, 0.1, 0.2, 0.3)  # values of `min_confidence` that are reported


def threshold_key(min_confidence: float) -> str:
    """The report's key for a threshold."""
    return f"min_confidence {min_confidence}"


@dataclass
class LatticeCounts(WalkCounts):
    """What one walk counted, drafts and their origin included."""

    empty: int = 0  # further steps, without any draft
    drafted: int = 0  # tokens verified beside the target's own
    from_context: int = 0  # accepted tokens that the text gave

    def report(self) -> dict[str, object]:
        """Plain figures for JSON; rates are shares, 0..1."""
        accepted, steps = sum(self.accepted_at), max(self.steps + self.empty, 1)
        return super().report() | {
            "tokens_per_step": round(1 + accepted / steps, 4),
            "drafts_per_step": round(self.drafted / steps, 4),
            "accepted_per_draft": round(accepted / max(self.drafted, 1), 4),
            "accepted_from_context": round(self.from_context / max(accepted, 1), 4),
        }


def walk_drafts(
    drafted: Drafted, lengths: list[int], places: int, min_confidence: float
) -> LatticeCounts:
    """Walk over whole answers of `lengths` tokens, at most `places` drafts a step."""
    kept_TP = drafted.kept(min_confidence)[:, :places]
    right_TP = (drafted.match_TP[:, :places] & kept_TP).cummin(1).values
    counts_T = kept_TP.sum(1).tolist()
    accepted_T = right_TP.sum(1).tolist()
    from_context_T = (right_TP & drafted.from_context_TP[:, :places]).sum(1).tolist()
    counts = LatticeCounts(accepted_at=[0] * places)
    first = 0
    for length in lengths:
        row = 0
        while row < length - 1:  # nothing is drafted once the last token is sampled
            taken = accepted_T[first + row]
            counts.steps += counts_T[first + row] > 0
            counts.empty += counts_T[first + row] == 0
            counts.drafted += counts_T[first + row]
            counts.from_context += from_context_T[first + row]
            for place in range(taken):
                counts.accepted_at[place] += 1
            row += taken + 1
        first += length
    return counts


def lattice_report(drafted: Drafted, texts: Texts, rows_T: Tensor) -> dict[str, Any]:
    """Figures for every k and threshold and, for the largest k, every group of sources.

    `rows_T` are whole answers in order; a group is what stands before a source's first colon.
    """
    records_R, lengths_R = texts.record_T[rows_T].unique_consecutive(return_counts=True)
    groups = [texts.sources[record].split(":")[0] for record in records_R.tolist()]
    lengths, places = lengths_R.tolist(), drafted.match_TP.shape[1]
    inside = {
        name: torch.tensor([group == name for group in groups]).repeat_interleave(lengths_R)
        for name in sorted(set(groups))
    }

    def rows_of(name: str) -> tuple[Drafted, list[int]]:
        own = [length for length, group in zip(lengths, groups, strict=True) if group == name]
        return drafted.at(inside[name]), own

    def by_k(some: Drafted, own: list[int], threshold: float) -> dict[str, object]:
        return {
            str(k + 1): walk_drafts(some, own, k, threshold).report() for k in range(1, places + 1)
        }

    return {
        threshold_key(threshold): {
            "by_k": by_k(drafted, lengths, threshold),
            "by_group": {name: by_k(*rows_of(name), threshold) for name in inside},
        }
        for threshold in THRESHOLDS
    }


def format_lattice(report: dict[str, Any]) -> str:
    """The report as text: a line for every threshold and k, then the largest k by group.

    Columns: drafts, k-hat, tokens a step, tokens drafted a step, share of accepted from the text.
    """
    lines = [
        f"{'heads and own text':44} {'drafts':>8} {'k-hat':>6} {'a step':>6} {'tokens':>6} "
        f"{'of text':>7}",
    ]
    for threshold, rows in report.items():
        lines += [_line(f"k = {k}, {threshold}", row) for k, row in rows["by_k"].items()]
    threshold, rows = next(iter(report.items()))
    for name, by_k in rows["by_group"].items():
        k, row = list(by_k.items())[-1]
        lines.append(_line(f"group {name!r}, k = {k}, {threshold}"[:44], row))
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    return (
        f"{name:44} {row['steps']:8d} {row['k_hat']:6.3f} {row['tokens_per_step']:6.3f} "
        f"{row['drafts_per_step']:6.2f} {row['accepted_from_context']:7.3f}"
    )
