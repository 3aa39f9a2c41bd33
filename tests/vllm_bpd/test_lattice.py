"""The lattice over a batch: every piece, and whole drafts, against its definition read plainly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.vllm_bpd.plain_lattice import (
    Head,
    as_heads,
    candidates_of,
    choose_from,
    continuing_weights,
    draft_of,
    matches_of,
    random_heads_say,
    random_weights,
    run_at,
    texts,
)
from vllm_bpd import lattice
from vllm_bpd.lattice import FLOOR, LONGEST_MATCH, MATCHES, NUM_WEIGHTS, SCALE

VOCAB = 4
seeds = st.integers(0, 2**31)
int_dtypes = st.sampled_from([torch.int32, torch.int64])
batches = st.lists(texts(), min_size=1, max_size=3)


def windows(rows: list[list[int]], padding: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Texts side by side, newest last, -1 before the first token."""
    width = max(map(len, rows)) + padding
    return torch.tensor([[-1] * (width - len(row)) + row for row in rows], dtype=dtype)


@given(batches, st.integers(0, 3), int_dtypes)
def test_a_run_is_how_many_tokens_equal_the_last_ones(
    rows: list[list[int]], padding: int, dtype: torch.dtype
) -> None:
    window_BW = windows(rows, padding, dtype)
    run_BC = lattice.match_runs(window_BW)
    assert run_BC.dtype == dtype
    assert run_BC.tolist() == [
        [run_at(row, place) for place in range(len(row) - 1)] for row in window_BW.tolist()
    ]


def test_runs_of_a_text_written_out() -> None:
    #        a  b  c  a  b  b  a  b
    text = [7, 8, 9, 7, 8, 8, 7, 8]
    assert lattice.match_runs(torch.tensor([text])).tolist() == [[0, 2, 0, 0, 2, 1, 0]]
    assert lattice.match_runs(torch.full((1, 5), -1)).tolist() == [[0] * 4]


def test_long_runs_count_as_the_longest() -> None:
    window_BW = torch.zeros(1, 40, dtype=torch.int64)
    run_BC = lattice.match_runs(window_BW)
    assert run_BC.tolist() == [[min(place + 1, LONGEST_MATCH) for place in range(39)]]
    _, run_BC = lattice.extend(window_BW, run_BC, torch.zeros(1, dtype=torch.int64))
    assert run_BC.tolist() == [[min(place + 1, LONGEST_MATCH) for place in range(40)]]


@given(batches, st.integers(0, 2), st.data())
def test_an_extended_window_has_the_runs_of_the_longer_one(
    rows: list[list[int]], padding: int, data: st.DataObject
) -> None:
    window_BW = windows(rows, padding)
    run_BC = lattice.match_runs(window_BW)
    for _ in range(3):
        newest_B = torch.tensor([data.draw(st.integers(-1, 2)) for _ in rows])
        longer_BW = torch.cat([window_BW, newest_B.unsqueeze(1)], 1)
        window_BW, run_BC = lattice.extend(window_BW, run_BC, newest_B)
        assert torch.equal(window_BW, longer_BW)
        assert torch.equal(run_BC, lattice.match_runs(longer_BW))


@given(batches.filter(lambda rows: max(map(len, rows)) > 1), int_dtypes)
def test_matches_come_longest_first_then_latest_first(
    rows: list[list[int]], dtype: torch.dtype
) -> None:
    window_BW = windows(rows, dtype=dtype)
    ids_BR, runs_BR = lattice.best_matches(window_BW, lattice.match_runs(window_BW))
    columns = window_BW.shape[1] - 1
    assert ids_BR.dtype == torch.int64
    assert ids_BR.shape == runs_BR.shape == (len(rows), min(MATCHES, columns))
    for row, ids, runs in zip(rows, ids_BR.tolist(), runs_BR.tolist(), strict=True):
        found = matches_of(row)
        empty = [(-1, 0)] * (len(ids) - len(found))
        assert list(zip(ids, runs, strict=True)) == found + empty


@st.composite
def places(draw: st.DrawFn) -> tuple[Head, list[tuple[int, int]]]:
    """What a head says at one place, and what stands behind matches, longest first."""
    ids = draw(st.lists(st.integers(0, VOCAB), max_size=4, unique=True))
    logp = torch.randn(len(ids), generator=torch.Generator().manual_seed(draw(seeds)))
    head = list(zip(ids, (-logp.abs()).sort(descending=True).values.tolist(), strict=True))
    tokens = draw(st.lists(st.integers(0, VOCAB), max_size=MATCHES))
    runs = sorted((draw(st.integers(1, 3)) for _ in tokens), reverse=True)
    return head, list(zip(tokens, runs, strict=True))


def gathered(given_places: list[tuple[Head, list[tuple[int, int]]]]) -> lattice.Candidates:
    """`gather_candidates` of several places at once, filled up with what is no candidate."""
    heads = [head + [(-1, -torch.inf)] * (5 - len(head)) for head, _ in given_places]
    behind = [found + [(-1, 0)] * (MATCHES - len(found)) for _, found in given_places]
    return lattice.gather_candidates(
        torch.tensor([[token for token, _ in head] for head in heads]),
        torch.tensor([[logp for _, logp in head] for head in heads]),
        torch.tensor([[token for token, _ in found] for found in behind]),
        torch.tensor([[run for _, run in found] for found in behind]),
    )


@given(st.lists(places(), min_size=1, max_size=3))
def test_each_token_is_a_candidate_once_with_its_longest_matches(
    given_places: list[tuple[Head, list[tuple[int, int]]]],
) -> None:
    found = gathered(given_places)
    assert (found.ids_BS.dtype, found.share_BS.dtype) == (torch.int64, torch.float32)
    for row, (head, behind) in enumerate(given_places):
        expected = candidates_of(head, behind)
        slots = (found.ids_BS[row] >= 0).nonzero().flatten()
        # The head's candidates keep their slots, and matches follow in their order.
        assert slots[: len(head)].tolist() == list(range(len(head)))
        assert found.ids_BS[row, slots].tolist() == [c.token for c in expected]
        assert found.run_BS[row, slots].tolist() == [c.run for c in expected]
        assert found.count_BS[row, slots].tolist() == [c.count for c in expected]
        assert found.share_BS[row, slots].tolist() == pytest.approx([c.share for c in expected])
        assert int(found.longest_B[row]) == (behind[0][1] if behind else 0)


def test_counts_and_shares_written_out() -> None:
    # Longest matches: 5, 5, 6 and a shorter one of 6; the head names 6 and 7.
    found = gathered([([(6, -0.5), (7, -1.0)], [(5, 3), (6, 3), (5, 3), (6, 2)])])
    assert found.ids_BS[0, :9].tolist() == [6, 7, -1, -1, -1, 5, -1, -1, -1]
    assert found.run_BS[0, [0, 1, 5]].tolist() == [3, 0, 3]
    assert found.count_BS[0, [0, 1, 5]].tolist() == [1, 0, 2]
    assert found.share_BS[0, [0, 1, 5]].tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert found.longest_B.tolist() == [3]


@given(st.lists(places(), min_size=1, max_size=3), seeds)
def test_the_best_score_is_chosen_and_confidence_is_its_probability(
    given_places: list[tuple[Head, list[tuple[int, int]]]], seed: int
) -> None:
    [weights_F] = random_weights(1, seed)
    expected = [
        choose_from(candidates_of(head, behind), behind[0][1] if behind else 0, weights_F.tolist())
        for head, behind in given_places
    ]
    assume(all(choice.margin > 1e-4 for choice in expected))
    found = gathered(given_places)
    id_B, confidence_B, slot_B = lattice.choose(found, weights_F)
    assert (id_B.dtype, confidence_B.dtype) == (torch.int64, torch.float32)
    assert id_B.tolist() == [choice.token for choice in expected]
    assert confidence_B.tolist() == pytest.approx([c.confidence for c in expected], abs=1e-5)
    chosen_B = found.ids_BS.gather(1, slot_B.unsqueeze(1)).squeeze(1)
    assert torch.equal(chosen_B.clamp(min=0), id_B)
    # All that may come next, "another token" included, shares the probability of 1.
    score_BT = lattice.scores(found, weights_F)
    assert score_BT.shape[1] == found.ids_BS.shape[1] + 1
    assert (score_BT[:, :-1].softmax(1).amax(1) >= confidence_B - 1e-6).all()


@pytest.mark.parametrize(
    ("head", "behind", "token"),
    [
        ([(3, -1.0), (2, -1.0)], [(1, 2)], 3),
        ([(3, -2.0), (2, -2.0)], [(1, 2), (2, 2)], 3),
        ([], [(2, 2), (1, 2), (1, 2)], 2),
    ],
)
def test_equal_scores_choose_the_first_slot(
    head: Head, behind: list[tuple[int, int]], token: int
) -> None:
    id_B, confidence_B, slot_B = lattice.choose(
        gathered([(head, behind)]), torch.zeros(NUM_WEIGHTS)
    )
    number = len({token for token, _ in [*head, *behind]})
    assert (id_B.tolist(), slot_B.tolist()) == ([token], [0 if head else 5])
    assert confidence_B.tolist() == pytest.approx([1 / (number + 1)])


@given(seeds)
def test_without_a_candidate_there_is_no_confidence(seed: int) -> None:
    [weights_F] = random_weights(1, seed)
    id_B, confidence_B, _ = lattice.choose(gathered([([], [])]), weights_F)
    assert (id_B.tolist(), confidence_B.tolist()) == ([0], [0.0])


@settings(max_examples=60)
@given(
    rows=batches.filter(lambda rows: max(map(len, rows)) > 1),
    padding=st.integers(0, 2),
    heads=st.integers(1, 4),
    more=st.integers(0, 3),
    count=st.integers(1, 5),
    dtype=int_dtypes,
    seed=seeds,
)
def test_a_block_is_drafted_place_by_place(
    rows: list[list[int]],
    padding: int,
    heads: int,
    more: int,
    count: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    window_BW = windows(rows, padding, dtype)
    ids_BKM, logp_BKM = random_heads_say(len(rows), heads, count, VOCAB, seed)
    weights_PF = random_weights(heads + more, seed)
    expected = [
        draft_of(row, as_heads(ids_BKM[b], logp_BKM[b]), weights_PF.tolist())
        for b, row in enumerate(rows)
    ]
    assume(all(choice.margin > 1e-4 for row in expected for choice in row))
    block = lattice.draft_block(window_BW, ids_BKM, logp_BKM, weights_PF)
    assert (block.ids_BP.dtype, block.confidence_BP.dtype) == (torch.int64, torch.float32)
    assert block.ids_BP.tolist() == [[choice.token for choice in row] for row in expected]
    for confidence, choices in zip(block.confidence_BP.tolist(), expected, strict=True):
        assert confidence == pytest.approx([choice.confidence for choice in choices], abs=1e-5)
    assert block.from_context_BP.tolist() == [[not c.own for c in row] for row in expected]
    # Nothing but what a head names or the text holds; id 0 stands where there is neither.
    for b, row in enumerate(rows):
        seen = {*row, *ids_BKM[b].flatten().tolist()} - {-1}
        for token, sure in zip(block.ids_BP[b].tolist(), block.confidence_BP[b], strict=True):
            assert token in seen or (token == 0 and sure == 0)
            seen.add(token)  # drafts are text for what comes behind them


@settings(max_examples=50)
@given(st.integers(1, 2), st.integers(2, 6), st.integers(1, 5), st.integers(2, 4), seeds)
def test_without_context_every_head_drafts_its_first_choice(
    rows: int, heads: int, count: int, vocab: int, seed: int
) -> None:
    """Also where the block repeats itself: its own drafts are no text to go on from."""
    ids_BKM, logp_BKM = random_heads_say(rows, heads, count, vocab, seed)
    weights_PF = random_weights(heads, seed)
    for width in (2, 9):
        empty_BW = torch.full((rows, width), -1, dtype=torch.int32)
        block = lattice.draft_block(empty_BW, ids_BKM, logp_BKM, weights_PF)
        assert torch.equal(block.ids_BP, ids_BKM[:, :, 0])
        assert not block.from_context_BP.any()


def flat_heads(rows: int, heads: int, token: int) -> tuple[Tensor, Tensor]:
    """Heads that all prefer `token`, and know no other one."""
    return torch.full((rows, heads, 1), token), torch.full((rows, heads, 1), -0.1)


def test_a_repeated_text_is_continued() -> None:
    phrase = [5, 9, 9, 3, 5, 7]
    text = [1, 2, *phrase, 4, *phrase[:3]]
    weights_PF = continuing_weights(6)
    block = lattice.draft_block(torch.tensor([text]), *flat_heads(1, 3, 8), weights_PF)
    # What follows the phrase's start, its end, the 4 behind it, and the phrase again.
    assert block.ids_BP.tolist() == [[3, 5, 7, 4, 5, 9]]
    assert block.from_context_BP.all()
    assert (block.confidence_BP > 0.99).all()


def test_the_latest_of_equally_long_matches_is_followed() -> None:
    block = lattice.draft_block(
        torch.tensor([[1, 6, 1, 7, 1]]), *flat_heads(1, 1, 8), continuing_weights(1)
    )
    assert block.ids_BP.tolist() == [[7]]


def test_a_heads_first_choice_is_its_own_also_where_the_text_agrees() -> None:
    weights_PF = continuing_weights(2)
    block = lattice.draft_block(torch.tensor([[1, 8, 2, 1]]), *flat_heads(1, 1, 8), weights_PF)
    assert block.ids_BP.tolist() == [[8, 2]]
    assert block.from_context_BP.tolist() == [[False, True]]


def test_behind_the_last_head_the_text_speaks_alone() -> None:
    weights_PF = continuing_weights(4)
    weights_PF[:, FLOOR], weights_PF[:, SCALE] = 0, 1
    rows = torch.tensor([[1, 2, 3, 4, 5, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
    block = lattice.draft_block(rows, *flat_heads(2, 1, 9), weights_PF)
    assert block.ids_BP.tolist() == [[3, 4, 5, 1], [9, 0, 0, 0]]
    assert block.from_context_BP[0].all()
    assert block.confidence_BP[1, 1:3].tolist() == [0, 0]
