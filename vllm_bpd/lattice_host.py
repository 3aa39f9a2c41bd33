"""`vllm_bpd.lattice` for requests on the host, compiled: what model runner V1 drafts with.

There, one step has few requests and every call of a torch operator costs as much as the whole
search: this takes microseconds. Same scores, same choices, up to float32 rounding. Compiled anew in
each process (seconds, at load): numba's cache on disk would not notice when a constant of
`vllm_bpd.lattice` changes, and fails to import where nothing can be written.

Shape suffixes as in `vllm_bpd.lattice`; L tokens of one request, T rows of the token table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from vllm_bpd.lattice import COUNT, FLOOR, LONGEST_MATCH, MATCH, MATCHES, NONE, SCALE, SHARE

_HIGHEST_SLOTS = 64  # room for a head's candidates and the matches


def draft_blocks(
    tokens_TL: NDArray[np.int32],
    rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    head_ids_BKM: NDArray[np.int64],
    head_logp_BKM: NDArray[np.float32],
    weights_PF: NDArray[np.float32],
    window: int,
    min_confidence: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Draft for the requests in `rows` of the token table, `lengths` tokens each.

    Searches the last `window` tokens (0: drafts from the heads alone; K = 0: from the text alone).
    A block ends before the draft with which the product of confidences falls below
    `min_confidence`, or where nothing is left to draft. Returns ids [B, P], how many of them count
    [B], and which came from the text.
    """
    size, places = len(rows), weights_PF.shape[0]
    ids_BP = np.zeros((size, places), np.int64)
    from_context_BP = np.zeros((size, places), np.bool_)
    counts_B = np.zeros(size, np.int64)
    _draft_blocks(
        tokens_TL, rows, lengths, head_ids_BKM, head_logp_BKM, weights_PF, window, min_confidence,
        ids_BP, counts_B, from_context_BP,
    )  # fmt: skip
    return ids_BP, counts_B, from_context_BP


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _draft_blocks(
    tokens_TL: Any,
    rows: Any,
    lengths: Any,
    head_ids_BKM: Any,
    head_logp_BKM: Any,
    weights_PF: Any,
    window: int,
    min_confidence: float,
    ids_BP: Any,
    counts_B: Any,
    from_context_BP: Any,
) -> None:
    places, heads = weights_PF.shape[0], head_ids_BKM.shape[1]
    no_ids, no_logp = np.empty(0, np.int64), np.empty(0, np.float32)
    for b in range(len(rows)):
        length = lengths[b]
        kept = min(length, window)
        text = np.empty(kept + places, np.int32)
        text[:kept] = tokens_TL[rows[b], length - kept : length]
        product = 1.0
        for place in range(places):
            match_ids, match_runs = _best_matches(text[: kept + place] if kept else text[:0])
            if place < heads:
                slot, token, confidence = _choose(
                    head_ids_BKM[b, place], head_logp_BKM[b, place], match_ids, match_runs,
                    weights_PF[place],
                )  # fmt: skip
            else:
                slot, token, confidence = _choose(
                    no_ids, no_logp, match_ids, match_runs, weights_PF[place]
                )
            product *= confidence
            if slot < 0 or product < min_confidence:
                break
            ids_BP[b, place] = token
            from_context_BP[b, place] = place >= heads or slot > 0
            counts_B[b] = place + 1
            if kept:
                text[kept + place] = token


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _best_matches(text: Any) -> tuple[Any, Any]:
    """Tokens behind the longest matches of `text`'s end, latest first among equals; lengths."""
    ids, runs = np.full(MATCHES, -1, np.int64), np.zeros(MATCHES, np.int64)
    end = len(text) - 1
    found = 0
    for place in range(end - 1, -1, -1):  # latest first
        if text[place] != text[end]:
            continue
        run = 1
        while run < LONGEST_MATCH and run <= place and text[place - run] == text[end - run]:
            run += 1
        if found == MATCHES and run <= runs[MATCHES - 1]:
            continue
        slot = min(found, MATCHES - 1)
        while slot > 0 and runs[slot - 1] < run:
            ids[slot], runs[slot] = ids[slot - 1], runs[slot - 1]
            slot -= 1
        ids[slot], runs[slot] = text[place + 1], run
        found = min(found + 1, MATCHES)
    return ids, runs


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _choose(
    head_ids: Any, head_logp: Any, match_ids: Any, match_runs: Any, weights: Any
) -> tuple[int, int, float]:
    """Slot (-1: no candidate), id and confidence of the best candidate at one place."""
    longest = match_runs[0]
    number = np.sum(match_runs == longest)
    score = np.empty(_HIGHEST_SLOTS, np.float32)
    heads, matches = len(head_ids), len(match_ids)
    for slot in range(heads + matches):
        is_head = slot < heads
        token = head_ids[slot] if is_head else match_ids[slot - heads]
        score[slot] = -np.inf
        if token < 0 or (not is_head and _named_before(token, slot - heads, head_ids, match_ids)):
            continue
        run = count = 0
        for r in range(matches):  # longest first, so the first equal one tells the run
            if match_ids[r] == token and (run == 0 or match_runs[r] == run):
                run = match_runs[r]
                count += 1
        value = weights[SCALE] * head_logp[slot] if is_head else weights[FLOOR]
        value += weights[MATCH + run] + weights[COUNT] * math.log(max(count, 1))
        if run > 0 and run == longest:
            value += weights[SHARE] * (count / number)
        score[slot] = value
    best = int(np.argmax(score[: heads + matches]))
    if score[best] == -np.inf:
        return -1, 0, 0.0
    total = math.exp(weights[NONE + longest] - score[best])
    for slot in range(heads + matches):
        total += math.exp(score[slot] - score[best])
    token = head_ids[best] if best < heads else match_ids[best - heads]
    return best, token, 1.0 / total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _named_before(token: int, match: int, head_ids: Any, match_ids: Any) -> bool:
    """Whether a head's candidate or a match before number `match` already gives `token`."""
    return bool(np.any(head_ids == token)) or bool(np.any(match_ids[:match] == token))
