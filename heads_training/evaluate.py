"""Evaluates a heads checkpoint on recorded greedy answers of its target, offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from heads_training.dataset import Texts, coverage, read_texts, split_held_out
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import draft_rows, make_lattice
from heads_training.lattice_walk import format_lattice, lattice_report
from heads_training.target import TargetRows, read_rows
from heads_training.walk import format_table, match_rows, walk_report
from vllm_bpd.checkpoint import load_heads, load_lattice
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import explain_mismatch


def evaluate(
    heads_folder: Path, target: str, answers: Path, states: Path, held_out: float | None = None
) -> dict[str, Any]:
    """Report of the walk over the answers of `answers`, in bf16 as served.

    All of them, or those that training with the share `held_out` (0..1) reports on. Writes the
    answers' hidden states to `states` if they are not there yet. Raises HeadsError for bad input,
    or heads of another target.
    """
    heads, _ = load_heads(heads_folder)
    shards = write_states(target, answers, states)
    texts = read_texts(shards, heads.config.num_draft_heads)
    rows_T = texts.answer_rows
    if held_out is not None:
        rows_T = split_held_out(texts, held_out)[1]
        if not len(rows_T):
            raise HeadsError(
                f"validation: the share {held_out} of {texts.answers} answers holds none "
                "out; name answers to evaluate on with --on"
            )
    report = evaluate_rows(heads_folder, read_rows(target), texts, rows_T)
    return {"heads": heads_folder.name, "target": Path(target).name, **report}


def evaluate_rows(
    heads_folder: Path, target: TargetRows, texts: Texts, rows_T: torch.Tensor
) -> dict[str, Any]:
    """As `evaluate`, over the whole answers that `rows_T` (int64, in order) are."""
    heads, draft_ids_V = load_heads(heads_folder, torch.bfloat16)
    mismatch = explain_mismatch(heads.config.target, target.fingerprint)
    if mismatch:
        raise HeadsError(f"{heads_folder}: {mismatch}")
    match_TK = match_rows(heads, texts, rows_T, target, draft_ids_V)
    report = walk_report(match_TK, texts, rows_T)
    sampled_T = texts.sampled_T[rows_T]
    report["draft_vocabulary_coverage"] = (
        1.0 if draft_ids_V is None else round(coverage(sampled_T, draft_ids_V), 4)
    )
    records = set(texts.record_T[rows_T].tolist())
    report["loops"] = sum(texts.loops[i] for i in records)
    weights_PF = load_lattice(heads_folder)
    if weights_PF is not None:
        rows = make_lattice(heads, texts, rows_T, target, draft_ids_V, len(weights_PF))
        report["with_own_text"] = lattice_report(draft_rows(rows, weights_PF), texts, rows_T)
    return report


def format_report(report: dict[str, Any]) -> str:
    """The report as text, in one or two tables."""
    text = format_table(report)
    if "with_own_text" in report:
        text += "\n\n" + format_lattice(report["with_own_text"])
    return text


def write_json(path: Path, values: object) -> None:
    """Write `values` indented, the folder made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
