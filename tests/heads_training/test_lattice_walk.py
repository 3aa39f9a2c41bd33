"""The walk where drafts may end early, counted by hand."""

from __future__ import annotations

import pytest
import torch

from heads_training.lattice_fit import Drafted
from heads_training.lattice_walk import (
    THRESHOLDS,
    format_lattice,
    lattice_report,
    threshold_key,
    walk_drafts,
)
from heads_training.walk import walk
from tests.heads_training.made_data import made_texts


def drafted(match: list[list[int]], confidence: float | list[list[float]] = 1.0) -> Drafted:
    match_TP = torch.tensor(match).bool()
    if isinstance(confidence, float):
        confidence = [[confidence] * match_TP.shape[1]] * len(match)
    from_context_TP = torch.zeros_like(match_TP)
    from_context_TP[:, 1:] = True
    return Drafted(match_TP, torch.tensor(confidence), from_context_TP)


# Rows of one answer of six tokens. Steps start at rows 0, 3 and 4; the last token's row drafts not.
MATCH = [[1, 1], [0, 0], [1, 1], [0, 1], [1, 0], [0, 0]]


def test_sure_drafts_walk_as_without_thresholds() -> None:
    counts = walk_drafts(drafted(MATCH), [6], 2, 0.5)
    plain = walk(torch.tensor(MATCH).bool(), [6], 2)
    assert (counts.steps, counts.accepted_at) == (plain.steps, plain.accepted_at) == (3, [2, 1])
    assert (counts.empty, counts.drafted, counts.from_context) == (0, 6, 1)
    assert counts.report()["tokens_per_step"] == 2.0


def test_a_draft_ends_where_the_product_falls_below() -> None:
    confidence = [[0.9, 0.5], [1.0, 1.0], [1.0, 1.0], [0.3, 1.0], [0.6, 0.6], [1.0, 1.0]]
    counts = walk_drafts(drafted(MATCH, confidence), [6], 2, 0.5)
    # Row 0 keeps its first draft alone and ends at row 2, whose two drafts reach row 5.
    assert (counts.steps, counts.empty, counts.drafted) == (2, 0, 3)
    assert counts.accepted_at == [2, 1]


def test_a_step_without_drafts_is_no_draft() -> None:
    confidence = [[0.1, 1.0]] * 6
    counts = walk_drafts(drafted(MATCH, confidence), [6], 2, 0.5)
    assert (counts.steps, counts.empty, counts.drafted) == (0, 5, 0)
    assert counts.k_hat == counts.report()["tokens_per_step"] == 1.0


@pytest.mark.parametrize("confidence", [0.0, 1e-12])
def test_what_nothing_suggests_is_never_drafted(confidence: float) -> None:
    counts = walk_drafts(drafted([[1, 1]] * 4, confidence), [4], 2, 0.0)
    assert (counts.steps, counts.empty) == (0, 3)


def test_answers_do_not_run_into_each_other() -> None:
    counts = walk_drafts(drafted([[1, 1]] * 6), [3, 3], 2, 0.0)
    assert counts.steps == 2


def test_report_has_every_threshold_k_and_group() -> None:
    texts = made_texts(
        [(torch.tensor([1]), torch.arange(3)), (torch.tensor([2]), torch.arange(3))],
        torch.zeros(6, 4),
        2,
    )
    texts.sources[:] = ["a:x", "b"]
    report = lattice_report(drafted([[1, 1]] * 3 + [[0, 0]] * 3), texts, torch.arange(6))
    assert list(report) == [threshold_key(threshold) for threshold in THRESHOLDS]
    rows = report[threshold_key(0.1)]
    assert rows["by_k"]["3"]["steps"] == 3
    assert rows["by_group"]["a"]["3"]["k_hat"] == 3.0
    assert rows["by_group"]["b"]["2"]["k_hat"] == 1.0
    assert "group 'a', k = 3" in format_lattice(report)
