"""The bigram term learns which token follows which, and changes the heads' order."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.bigram_term import BigramTerm, Rows, fit_term, rows_of, run, with_term
from benchmarks.trials import JUDGED
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import Lattice
from heads_training.target import read_rows
from heads_training.train import new_heads, prepare
from tests.heads_training.made_data import TINY, made_texts
from vllm_bpd.checkpoint import save_heads
from vllm_bpd.lattice import MATCHES

VOCAB, HEADS = 12, 2


def test_what_stands_before_and_at_each_place() -> None:
    texts = made_texts([(torch.tensor([1, 2]), torch.tensor([5, 6, 7]))], torch.zeros(3, 4), HEADS)
    nothing_TKM = torch.zeros(3, HEADS, 1)
    rows = rows_of(texts, torch.arange(3), nothing_TKM.long(), nothing_TKM)
    # At row 0 the target samples 5; the heads draft 6 and 7 behind it.
    assert rows.before_TK.tolist() == [[5, 6], [6, 7], [7, -1]]
    assert rows.right_TK.tolist() == [[6, 7], [7, -1], [-1, -1]]


def test_the_term_learns_successors() -> None:
    """Heads that cannot tell x from x + 1 behind x learn that it is x + 1."""
    torch.manual_seed(0)
    before_TK = torch.randint(0, VOCAB - 1, (400, HEADS))
    right_TK = before_TK + 1
    ids_TKM = torch.stack([before_TK, right_TK], 2)
    term = BigramTerm(torch.arange(VOCAB), VOCAB, rank=8)
    rows = Rows(ids_TKM, torch.zeros(ids_TKM.shape), before_TK, right_TK)
    assert not term(before_TK[:, 0], ids_TKM[:, 0]).any()
    fit_term(term, rows, epochs=200)
    score_BM = term(before_TK[:, 1], ids_TKM[:, 1])
    assert (score_BM[:, 1] > score_BM[:, 0] + 1).all()


def test_ids_that_are_not_scored_share_a_row() -> None:
    term = BigramTerm(torch.tensor([3, 5]), VOCAB, rank=4)
    torch.nn.init.normal_(term.after.weight)
    one, other, scored = term(torch.tensor([0, 1, 3]), torch.tensor([[5], [5], [5]])).flatten()
    assert one == other != scored


def test_candidates_come_best_first() -> None:
    texts = made_texts([(torch.tensor([1]), torch.tensor([2, 3, 4]))], torch.zeros(3, 4), 1)
    lattice = Lattice(
        torch.tensor([[[7, 3]], [[7, 4]], [[7, 5]]]),
        torch.full((3, 1, 2), -1.0),
        torch.full((3, MATCHES), -1),
        torch.zeros(3, MATCHES, dtype=torch.int64),
        torch.tensor([[3], [4], [-1]]),
    )
    term = BigramTerm(torch.arange(VOCAB), VOCAB, rank=1)
    torch.nn.init.ones_(term.before.weight)
    term.after.weight.data[7] = -2.0
    found = with_term(term, texts, torch.arange(3), lattice)
    assert found.head_ids_TKM.tolist() == [[[3, 7]], [[4, 7]], [[5, 7]]]
    assert found.head_logp_TKM[0, 0].tolist() == [-1.0, -3.0]
    assert with_term(None, texts, torch.arange(3), lattice) is lattice


def test_both_are_walked(tiny_target: Path, tiny_answers: Path, tmp_path: Path) -> None:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path / "states")
    data = prepare(TINY, shards, read_rows(str(tiny_target)))
    save_heads(tmp_path / "heads", new_heads(TINY, data), data.draft_ids_V)
    arguments = argparse.Namespace(
        target=str(tiny_target), heads=tmp_path / "heads", answers=tiny_answers, judge=tiny_answers,
        rank=8, epochs=40, places=3, work=tmp_path,
    )  # fmt: skip
    found = run(arguments)["drafters"]
    assert set(found) == {name + more for name in JUDGED for more in ("", " with the term")}
    # New heads say again what the target just said; the term knows what follows it.
    plain, better = (
        found[name]["all"]["3"]["tokens_per_step"] for name in found if "heads" in name
    )
    assert better > plain
