"""The engine's own drafters, offline: what they would draft at every row of recorded answers.

Each is called as vLLM calls it, token by token: `ngram` with the function that vLLM compiles,
suffix decoding with the library that vLLM uses (arctic-inference), once with the request's own text
alone and once remembering the answers before it. None looks at hidden states. A draft at a row is
the same for every k but for where it is cut.

Shape suffixes: T rows (answer tokens), P places of the block, N tokens of one answer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads_training.dataset import Texts
from heads_training.lattice_fit import Drafted
from heads_training.lattice_walk import LatticeCounts, walk_drafts

NGRAM = (1, 5)  # tokens matched: fewest, most
# vLLM's defaults of suffix decoding.
TREE_DEPTH = 24
SPEC_FACTOR = 1.0
MIN_TOKEN_PROB = 0.1
_HALVINGS = 10  # of the interval in which a cut is looked for


def peers(texts: Texts, right_TP: Tensor) -> dict[str, Drafted]:
    """Every peer that is installed, at all rows. `right_TP` (int64): the tokens that are right."""
    places = right_TP.shape[1]
    found = {}
    if importlib.util.find_spec("vllm"):
        found["ngram"] = always(_ids(ngram(texts, places), places), right_TP)
    if importlib.util.find_spec("arctic_inference"):
        for name, remember in (("suffix", False), ("suffix, remembering", True)):
            found[name] = always(_ids(suffix(texts, places, remember), places), right_TP)
    return found


def always(ids_TP: Tensor, right_TP: Tensor, from_text_TP: Tensor | None = None) -> Drafted:
    """Drafts wherever there is an id (-1: none), whatever the odds."""
    drafted_TP = ids_TP >= 0
    return Drafted(
        ids_TP == right_TP.masked_fill(right_TP < 0, -2),
        drafted_TP.float(),
        drafted_TP if from_text_TP is None else from_text_TP,
    )


def ngram(texts: Texts, places: int) -> Iterator[list[int]]:
    """Drafts at each row in turn, of vLLM's `ngram`."""
    from vllm.v1.spec_decode import ngram_proposer

    find = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
    for tokens_N, first in _texts(texts):
        for end in range(first, len(tokens_N)):
            yield find(tokens_N[: end + 1], *NGRAM, end + 2 + places, places).tolist()


def suffix(texts: Texts, places: int, remember: bool) -> Iterator[list[int]]:
    """Drafts at each row in turn, of suffix decoding; `remember` earlier answers or none."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache: Any = SuffixDecodingCache(
        max_tree_depth=TREE_DEPTH, max_cached_requests=len(texts.ids) if remember else 0
    )
    for number, (tokens_N, first) in enumerate(_texts(texts)):
        cache.start_request(number, tokens_N[:first])
        for end in range(first, len(tokens_N)):
            cache.add_active_response(number, tokens_N[end : end + 1])
            draft = cache.speculate(
                number,
                tokens_N[max(0, end + 1 - TREE_DEPTH) : end + 1],
                max_spec_tokens=places,
                max_spec_factor=SPEC_FACTOR,
                min_token_prob=MIN_TOKEN_PROB,
            )
            yield draft.token_ids
        cache.stop_request(number)


def at_equal_cost(
    ours: Drafted, theirs: Drafted, lengths: list[int], places: int
) -> dict[str, dict[str, float]]:
    """Both walked at the same number of verified tokens, or ours at fewer.

    Ours are cut at the lowest `min_confidence` with which they draft no more a step than theirs.
    """
    peer = walk_drafts(theirs, lengths, places, 0.0)

    def walked(cut: float) -> tuple[LatticeCounts, bool]:
        """And whether it costs no more than the peer."""
        counts = walk_drafts(ours, lengths, places, cut)
        return counts, _drafts_a_step(counts) <= _drafts_a_step(peer)

    cut, step = 0.0, 1.0
    counts, cheap = walked(cut)
    if not cheap:
        cut = 1.0
        for _ in range(_HALVINGS):
            step /= 2
            if walked(cut - step)[1]:
                cut -= step
        counts, _ = walked(cut)
    return {
        "peer": _figures(peer),
        "lattice": _figures(counts) | {"min_confidence": round(cut, 4)},
    }


def _drafts_a_step(counts: LatticeCounts) -> float:
    return counts.drafted / max(counts.steps + counts.empty, 1)


def _figures(counts: LatticeCounts) -> dict[str, float]:
    report: dict[str, Any] = counts.report()
    return {
        name: report[name] for name in ("tokens_per_step", "drafts_per_step", "accepted_per_draft")
    }


def _texts(texts: Texts) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int32]], int]]:
    """Each text's ids, and where its answer begins."""
    for ids_N, length in zip(texts.ids, texts.answer_lengths_R.tolist(), strict=True):
        yield ids_N.int().numpy(), len(ids_N) - length


def _ids(drafts: Iterator[list[int]], places: int) -> Tensor:
    """int64 [T, P], -1 where nothing is drafted."""
    rows = [(draft + [-1] * places)[:places] for draft in drafts]
    return torch.tensor(rows, dtype=torch.int64)
