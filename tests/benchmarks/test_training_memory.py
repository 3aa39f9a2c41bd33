"""What a training step holds, counted: the benchmark's figures are of chunks, or of all rows."""

from __future__ import annotations

import pytest

from benchmarks import training_memory
from benchmarks.training_memory import step_bytes


def test_whole_logits_cost_what_they_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked, four times the length adds by the width alone; whole, by the vocabulary."""
    for name, value in (("HIDDEN", 8), ("UNITS", 16), ("SCORED", 4096)):
        monkeypatch.setattr(training_memory, name, value)
    logits = 4 * 4096  # bytes a row, float32
    chunked = step_bytes(1024, 64) - step_bytes(256, 64)
    whole = step_bytes(1024, 1024) - step_bytes(256, 256)
    assert chunked < 0.1 * 768 * logits
    assert whole > 2 * 768 * logits
