"""The engine's drafters offline draft what their rules say, and are compared at equal cost."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.peers import always, at_equal_cost, ngram, peers, suffix
from heads_training.dataset import Texts
from heads_training.lattice_fit import Drafted, right_tokens
from tests.heads_training.made_data import made_texts

PROMPT, ANSWER = [1, 2, 3, 4, 9, 2, 3, 7, 8], [5, 2, 3, 4, 9]


def texts() -> Texts:
    """One answer that says a part of its prompt again."""
    states_TD = torch.zeros(len(ANSWER), 4)
    return made_texts([(torch.tensor(PROMPT), torch.tensor(ANSWER))], states_TD, 2)


def test_ngram_takes_the_first_of_the_longest_matches() -> None:
    # Behind 5: nothing. Behind 2: the first 2 of the prompt. Behind 2 3, 2 3 4, 2 3 4 9: again.
    assert list(ngram(texts(), 3)) == [[], [3, 4, 9], [4, 9, 2], [9, 2, 3], [2, 3, 7]]


@pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None, reason="needs arctic-inference"
)
def test_suffix_decoding_drafts_as_far_as_its_match_is_long() -> None:
    drafts = list(suffix(texts(), 3, remember=False))
    assert drafts[0] == []
    assert drafts[3] == [9, 2, 3]
    twice = made_texts([(torch.tensor([6]), torch.tensor(ANSWER))] * 2, torch.zeros(10, 4), 2)
    assert list(suffix(twice, 3, remember=False))[5:] == [[]] * 5
    assert list(suffix(twice, 3, remember=True))[8] == [9]


def test_peers_match_where_their_drafts_are_right() -> None:
    right_TP = right_tokens(torch.tensor(ANSWER), 3)
    found = peers(texts(), right_TP)["ngram"]
    assert found.match_TP.tolist() == [
        [False, False, False],
        [True, True, True],
        [True, True, False],  # nothing is right behind the answer's end
        [True, False, False],
        [False, False, False],
    ]
    assert found.confidence_TP.bool().any(1).tolist() == [False, True, True, True, True]


def test_at_equal_cost_ours_are_cut_until_they_verify_no_more() -> None:
    rows = 100
    right_TP = torch.arange(rows * 2).view(rows, 2)
    theirs = always(torch.where(torch.arange(2) == 0, right_TP, -1), right_TP)  # one sure draft
    sure_TP = torch.tensor([0.9, 0.5]).expand(rows, 2)
    ours = Drafted(torch.ones(rows, 2, dtype=torch.bool), sure_TP, torch.zeros(rows, 2).bool())
    found = at_equal_cost(ours, theirs, [rows], 2)
    assert found["peer"]["drafts_per_step"] == found["lattice"]["drafts_per_step"] == 1
    assert found["lattice"]["min_confidence"] == pytest.approx(0.45, abs=2e-3)
    cheaper = at_equal_cost(theirs, ours, [rows], 2)  # never more than it drafts anyway
    assert cheaper["lattice"]["min_confidence"] == 0
    assert cheaper["peer"]["drafts_per_step"] == 2
