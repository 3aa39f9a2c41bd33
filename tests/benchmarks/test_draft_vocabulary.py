"""Sizes of the draft vocabulary: each is scored, fitted and walked by itself."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import draft_vocabulary
from benchmarks.trials import JUDGED
from heads_training.hidden_states import write_states
from heads_training.target import read_rows
from heads_training.train import new_heads, prepare
from tests.heads_training.made_data import TINY
from vllm_bpd.checkpoint import save_heads


def test_more_ids_cover_and_cost_more(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_vocabulary, "_SECONDS", 0.01)
    shards = write_states(str(tiny_target), tiny_answers, tmp_path / "states")
    data = prepare(TINY, shards, read_rows(str(tiny_target)))
    save_heads(tmp_path / "heads", new_heads(TINY, data), data.draft_ids_V)
    arguments = argparse.Namespace(
        target=str(tiny_target),
        heads=tmp_path / "heads",
        answers=tiny_answers,
        judge=tiny_answers,
        sizes=[8, 32, 0],
        places=3,
        work=tmp_path,
    )
    found = draft_vocabulary.run(arguments)
    assert [row["scored ids"] for row in found] == [8, 32, data.target.fingerprint.vocab_size]
    shares = [row["share of the judged tokens"] for row in found]
    assert 0 < shares[0] < shares[1] < shares[2] == 1
    assert all(row["cost"] > 0 for row in found)
    # New heads say what the target says: more often among the ids they may say.
    heads = [row["drafters"]["heads"]["all"]["2"]["tokens_per_step"] for row in found]
    assert len(set(heads)) > 1
    table = draft_vocabulary.as_markdown(found, "2")
    assert table.count("\n| ") == 1 + len(found)
    assert all(name in table for name in JUDGED)
