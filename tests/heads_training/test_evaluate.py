"""Accuracy by head, worked out by hand; the picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from heads_training.dataset import IGNORED, Texts
from heads_training.plot import write_plot
from heads_training.walk import format_table, head_accuracy, walk_report
from vllm_bpd.errors import HeadsError


def test_accuracy_by_head() -> None:
    next_TK = torch.tensor([[1, 2], [2, 3], [3, 4], [4, IGNORED], [IGNORED, IGNORED]])
    match_TK = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 0], [0, 0]]).bool()
    first, second = head_accuracy(match_TK, next_TK)
    assert first == {"rows": 4, "marginal": 0.75, "conditional": 0.75, "cumulative": 0.75}
    # Rows 0..2 reach far enough; head 1 is right in 0 and 2, and in 0 of the two behind head 0.
    assert second["rows"] == 3
    assert second["marginal"] == pytest.approx(2 / 3, abs=1e-4)
    assert second["conditional"] == 0.5
    assert second["cumulative"] == pytest.approx(1 / 3, abs=1e-4)


def made_report() -> dict[str, object]:
    """Two answers of different groups; the first is drafted without a fault."""
    rows = 20
    next_TK = torch.arange(rows * 2).view(rows, 2)
    match_TK = torch.zeros(rows, 2, dtype=torch.bool)
    match_TK[:10] = True
    record_T = torch.arange(rows) // 10
    lengths_R, sources = torch.tensor([10, 10]), ["x:1", "y<&>"]
    no_prompt_R = torch.zeros(2, dtype=torch.bool)
    texts = Texts(
        [], torch.arange(rows), next_TK, record_T, [b"a", b"b"], sources, [False], [], lengths_R,
        no_prompt_R,
    )  # fmt: skip
    return walk_report(match_TK, texts, torch.arange(rows))


def test_report_by_group() -> None:
    report = made_report()
    groups = report["by_group"]
    assert isinstance(groups, dict)
    assert groups["x"]["k_hat_by_k"] == {"2": 2.0, "3": 3.0}
    assert groups["y<&>"]["k_hat_by_k"] == {"2": 1.0, "3": 1.0}
    assert "head 2, 3 tokens ahead" in format_table(report)


def test_picture_shows_the_figures(tmp_path: Path) -> None:
    report = made_report()
    write_plot(tmp_path / "new" / "p.svg", report)
    picture = (tmp_path / "new" / "p.svg").read_text()
    ElementTree.fromstring(picture)
    for text in ("accuracy by head", "mean accepted block by k", "2 answers, 20 tokens", "3.00"):
        assert f"<!-- {text} -->" in picture, text  # matplotlib draws text as shapes, so named
    write_plot(tmp_path / "p.png", report)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=r"plot: found .*p\.gif; expected a file name with \.png"):
        write_plot(tmp_path / "p.gif", made_report())
