"""The table of the paper's figures beside ours, and what it says of their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_table import MODES, RESULTS, TEXTS, format_table

GUIDE = Path(__file__).parents[2] / "docs" / "paper-table.md"


def made(k_hats: dict[str, float]) -> dict[str, Any]:
    cells = {name: {"mean_accepted_block": value, "right": 0.5} for name, value in k_hats.items()}
    return {"cells": cells, "bases": {"regular": {"right": 0.9}}}


def test_order_is_counted_and_its_exceptions_named() -> None:
    table = format_table(
        made(
            {
                "regular-frozen-k4": 1.5,
                "regular-finetune-k4": 2.0,
                "distilled-frozen-k4": 1.4,
                "distilled-finetune-k4": 3.0,
                "distilled-frozen-k8": 1.6,
            }
        )
    )
    assert "fine-tuned above frozen: shows in 2 of 2 pairs" in table
    assert "distilled above regular: shows in 1 of 2 pairs; not for k = 4, regular frozen" in table
    assert "| **1.50** (paper 1.73), 50.0% right |" in table
    assert "| 8 | not run | **1.60** (paper 1.91), 50.0% right | not run | not run |" in table


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return values


def test_every_cell_was_run(results: dict[str, Any]) -> None:
    names = {f"{text}-{mode}-k{k}" for text in TEXTS for mode in MODES for k in (2, 4, 6, 8)}
    assert set(results["cells"]) == names


def test_the_guide_shows_the_results(results: dict[str, Any]) -> None:
    assert format_table(results) in GUIDE.read_text(encoding="utf-8")
