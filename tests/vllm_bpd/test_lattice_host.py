"""Drafting on the host: what the batched lattice drafts, and where a block ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="comes with vLLM")

from tests.vllm_bpd.plain_lattice import (
    as_heads,
    continuing_weights,
    draft_of,
    matches_of,
    random_heads_say,
    random_weights,
    texts,
)
from vllm_bpd import lattice_host
from vllm_bpd.lattice import CANDIDATES, MATCHES, NONE, NUM_WEIGHTS, SCALE, Block, draft_block

VOCAB = 4
seeds = st.integers(0, 2**31)


class Asked(NamedTuple):
    """Arguments of `draft_blocks`, as tensors, without the window and the threshold."""

    rows: list[list[int]]
    ids_BKM: torch.Tensor
    logp_BKM: torch.Tensor
    weights_PF: torch.Tensor

    def on_host(self, window: int, min_confidence: float = 0.0, spare: int = 2) -> Any:
        """`draft_blocks` from a table in which the requests lie in reverse, between others."""
        width = max(map(len, self.rows)) + spare
        table_TL = np.full((2 * len(self.rows) + 1, width), 1, np.int32)  # stale ids behind
        slots = np.arange(len(self.rows))[::-1] * 2 + 1
        for slot, row in zip(slots, self.rows, strict=True):
            table_TL[slot, : len(row)] = row
        before_TL = table_TL.copy()
        found = lattice_host.draft_blocks(
            table_TL,
            slots,
            np.array([len(row) for row in self.rows]),
            self.ids_BKM.numpy(),
            self.logp_BKM.numpy(),
            self.weights_PF.numpy(),
            window,
            min_confidence,
        )
        assert np.array_equal(table_TL, before_TL)  # it is the engine's
        return found

    def batched(self, window: int) -> Block:
        """`draft_block` on the last `window` tokens of each request."""
        window_BW = torch.full((len(self.rows), max(window, 2)), -1, dtype=torch.int32)
        for b, row in enumerate(self.rows):
            kept = row[max(len(row) - window, 0) :]
            if kept:
                window_BW[b, -len(kept) :] = torch.tensor(kept)
        return draft_block(window_BW, self.ids_BKM, self.logp_BKM, self.weights_PF)

    def confidences(self, window: int) -> list[list[float]]:
        """Of each draft; rows where two candidates score nearly the same are not to be asked."""
        choices = [
            draft_of(
                row[max(len(row) - window, 0) :],
                as_heads(self.ids_BKM[b], self.logp_BKM[b]),
                self.weights_PF.tolist(),
            )
            for b, row in enumerate(self.rows)
        ]
        assume(all(choice.margin > 1e-4 for row in choices for choice in row))
        return [[choice.confidence for choice in row] for row in choices]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    rows = draw(st.lists(texts(), min_size=1, max_size=3))
    heads, more, count = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    seed = draw(seeds)
    said = random_heads_say(len(rows), heads, count, VOCAB, seed)
    return Asked(rows, *said, random_weights(heads + more, seed))


def counts_until(confidences: list[list[float]], min_confidence: float) -> list[int]:
    """How many drafts of each request are as probable as that, and are drafts at all."""
    counts = []
    for row in confidences:
        product, count = 1.0, 0
        for confidence in row:
            product *= confidence
            assume(abs(product - min_confidence) > 1e-4 or confidence == 0)
            if confidence == 0 or product < min_confidence:
                break
            count += 1
        counts.append(count)
    return counts


def check(found: Any, block: Block, counts: list[int]) -> None:
    """Up to each request's count, host and batch draft alike; behind it there is nothing."""
    ids_BP, counts_B, from_context_BP = found
    assert (ids_BP.dtype, counts_B.dtype, from_context_BP.dtype) == (np.int64, np.int64, np.bool_)
    assert counts_B.tolist() == counts
    for b, count in enumerate(counts):
        assert ids_BP[b, :count].tolist() == block.ids_BP[b, :count].tolist()
        own = block.from_context_BP[b, :count].tolist()
        assert from_context_BP[b, :count].tolist() == own
        assert not ids_BP[b, count:].any()
        assert not from_context_BP[b, count:].any()


@settings(max_examples=60)
@given(requests(), st.integers(2, 60))
def test_the_host_drafts_what_the_batch_drafts(asked: Asked, window: int) -> None:
    """Also where the window is shorter than the text: it sees no further back."""
    counts = counts_until(asked.confidences(window), 0.0)
    check(asked.on_host(window), asked.batched(window), counts)


@settings(max_examples=30)
@given(requests())
def test_without_a_window_the_heads_draft_alone(asked: Asked) -> None:
    counts = counts_until(asked.confidences(0), 0.0)
    ids_BP, counts_B, from_context_BP = asked.on_host(0)
    check((ids_BP, counts_B, from_context_BP), asked.batched(0), counts)
    heads = asked.ids_BKM.shape[1]
    assert counts_B.tolist() == [heads] * len(asked.rows)
    assert np.array_equal(ids_BP[:, :heads], asked.ids_BKM[:, :, 0].numpy())
    assert not from_context_BP.any()


@settings(max_examples=60)
@given(requests(), st.floats(0.001, 0.9))
def test_a_block_ends_before_the_draft_that_is_too_unlikely(
    asked: Asked, min_confidence: float
) -> None:
    counts = counts_until(asked.confidences(100), min_confidence)
    check(asked.on_host(100, min_confidence), asked.batched(100), counts)


def test_what_a_block_loses_to_the_threshold() -> None:
    """Three drafts of probability 1/2 each: 1/2, 1/4, 1/8."""
    half = torch.full((1, 3, 1), 0.5).log()
    weights_PF = torch.zeros(3, NUM_WEIGHTS)
    weights_PF[:, SCALE] = 1
    weights_PF[:, NONE] = half[0, 0, 0]  # another token: the other half
    asked = Asked([[1, 2, 3]], torch.tensor([[[7], [8], [9]]]), half, weights_PF)
    for threshold, count in ((0.51, 0), (0.49, 1), (0.26, 1), (0.24, 2), (0.12, 3), (0.0, 3)):
        ids_BP, counts_B, _ = asked.on_host(8, threshold)
        assert (counts_B[0], ids_BP[0].tolist()) == (count, [7, 8, 9][:count] + [0] * (3 - count))


@given(texts())
def test_matches_come_longest_first_then_latest_first(text: list[int]) -> None:
    ids, runs = lattice_host._best_matches(np.array(text, np.int32))
    found = matches_of(text)
    assert (len(ids), len(runs)) == (MATCHES, MATCHES)
    assert list(zip(ids, runs, strict=True)) == found + [(-1, 0)] * (MATCHES - len(found))


def test_nothing_matches_in_an_empty_text() -> None:
    ids, runs = lattice_host._best_matches(np.zeros(0, np.int32))
    assert (set(ids), set(runs)) == ({-1}, {0})


def flat(rows: list[list[int]], places: int) -> Asked:
    """Requests whose two heads all say 8, beside weights that prefer the text."""
    ids_BKM = torch.full((len(rows), 2, 1), 8)
    logp_BKM = torch.full((len(rows), 2, 1), -0.1)
    return Asked(rows, ids_BKM, logp_BKM, continuing_weights(places))


def test_a_repeated_text_is_continued_within_the_window() -> None:
    asked = flat([[3, 4, 5, 6, 3, 4, 5, 6, 3], [3, 9, 9, 9, 9, 9, 9, 9, 3]], 3)
    ids_BP, _, from_context_BP = asked.on_host(9)
    assert ids_BP.tolist() == [[4, 5, 6], [9, 9, 9]]
    assert from_context_BP.all()
    ids_BP, _, from_context_BP = asked.on_host(8)  # hides the second one's first token
    assert ids_BP.tolist()[0] == [4, 5, 6]
    assert ids_BP[1, 0] == 8
    assert not from_context_BP[1, 0]


def test_behind_the_last_head_a_block_ends_where_the_text_is_silent() -> None:
    ids_BP, counts_B, from_context_BP = flat([[1, 2, 3], [8, 8, 4, 5, 6, 7]], 6).on_host(100)
    assert ids_BP.tolist()[0] == [8, 8, 8, 8, 8, 8]  # its own drafts go on
    assert from_context_BP.tolist()[0] == [False, False, True, True, True, True]
    assert ids_BP.tolist()[1] == [8, 8, 4, 5, 6, 7]
    assert counts_B.tolist() == [6, 6]
    asked = flat([[1, 2, 3]], 4)
    asked.ids_BKM[0, 1] = 9
    ids_BP, counts_B, _ = asked.on_host(100)
    assert (ids_BP.tolist(), counts_B.tolist()) == ([[8, 9, 0, 0]], [2])


@pytest.mark.parametrize("places", [1, 2, 5])
def test_there_are_as_many_places_as_rows_of_weights(places: int) -> None:
    ids_BP, counts_B, _ = flat([[8, 8, 8]], places).on_host(100)
    assert (ids_BP.tolist(), counts_B.tolist()) == ([[8] * places], [places])


def test_there_is_room_for_all_candidates() -> None:
    """Compiled code checks no bounds."""
    assert CANDIDATES + MATCHES <= lattice_host._HIGHEST_SLOTS
