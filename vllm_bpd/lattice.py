"""Heads and the request's own text, scored together: which token stands at each place of a block.

The heads' most probable tokens (as in the lattice of Kim et al. 2024, arXiv 2404.09221) meet the
tokens that followed earlier occurrences of the request's last words. At each place of the block
every candidate gets a log-linear score, the best one is drafted, and the next place sees it as
the last word. A score needs no further product with the vocabulary. Lossless: the target verifies
what comes out.

Plain torch over a batch, with shapes that never depend on values: model runner V2 captures it in
its CUDA graph, and training measures with it. `vllm_bpd.lattice_host` is the same for one request
on the host; a test holds both to equal drafts.

A candidate's score at one place is, with the place's own row of weights,

    scale * log q(x)  or  floor          q: the head's probability; floor where it has none
    + match[r(x)]                        r: longest earlier match that x followed, tokens; 0: none
    + count * log n(x) + share * s(x)    n: such matches; s: their share of all the longest ones

and `none[r]`, for the longest match of all, is the score of "another token": a softmax over all
gives the confidence that the draft will be accepted.

Shape suffixes: B rows, W window and tokens drafted so far, C columns that can match, L tokens of
the longest match that counts, M candidates of a head, R matches, S = M + R candidates, K heads, P
places of the block, F weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

CANDIDATES = 12  # of each head, M
MATCHES = 16  # of the last words, R
LONGEST_MATCH = 16  # tokens; longer ones count as this long
_FAR_BELOW = -1e9  # score of what is no candidate

# Columns of a row of weights.
SCALE, FLOOR, COUNT, SHARE = range(4)
MATCH = 4
NONE = MATCH + LONGEST_MATCH + 1
NUM_WEIGHTS = NONE + LONGEST_MATCH + 1


@dataclass(frozen=True)
class Block:
    """Drafts of one step, and what is known of them."""

    ids_BP: Tensor  # int64
    confidence_BP: Tensor  # float32, 0..1: each draft accepted, if those before it are
    from_context_BP: Tensor  # bool: the token followed an earlier match and is not the head's own


def draft_block(
    window_BW: Tensor, head_ids_BKM: Tensor, head_logp_BKM: Tensor, weights_PF: Tensor
) -> Block:
    """Draft P tokens for each row.

    `window_BW` int32 or int64: the request's last tokens, newest last, -1 before its first; all
    -1 drafts from the heads alone. `head_ids_BKM` int64, `head_logp_BKM` float32 natural
    logarithms, best first. Places behind the K-th have no head: the text alone speaks there.
    """
    places, heads = weights_PF.shape[0], head_ids_BKM.shape[1]
    has_text_B = window_BW[:, -1] >= 0
    run_BC = match_runs(window_BW)
    ids: list[Tensor] = []
    confidence: list[Tensor] = []
    from_context: list[Tensor] = []
    for place in range(places):
        if place:
            # Without a text, a row's own drafts are none to go on from either.
            newest_B = torch.where(has_text_B, ids[-1], -1)
            window_BW, run_BC = extend(window_BW, run_BC, newest_B)
        match_ids_BR, match_runs_BR = best_matches(window_BW, run_BC)
        head = min(place, heads - 1)
        place_ids_BM, place_logp_BM = head_ids_BKM[:, head], head_logp_BKM[:, head]
        if place >= heads:
            place_ids_BM = torch.full_like(place_ids_BM, -1)
        candidates = gather_candidates(place_ids_BM, place_logp_BM, match_ids_BR, match_runs_BR)
        id_B, confidence_B, slot_B = choose(candidates, weights_PF[place])
        ids.append(id_B)
        confidence.append(confidence_B)
        # A head's first choice leads its candidates, so any other slot was lifted by a match.
        from_context.append(slot_B > 0 if place < heads else slot_B >= 0)
    return Block(torch.stack(ids, 1), torch.stack(confidence, 1), torch.stack(from_context, 1))


def match_runs(window_BW: Tensor) -> Tensor:
    """How many tokens up to each column equal the window's last ones, [B, W - 1], its dtype."""
    if window_BW.shape[1] == 1:
        return window_BW[:, :0]
    earlier_BC = nn.functional.pad(window_BW[:, :-1], (LONGEST_MATCH - 1, 0), value=-1)
    missing = max(0, LONGEST_MATCH - window_BW.shape[1])
    last_BL = nn.functional.pad(window_BW[:, -LONGEST_MATCH:], (missing, 0), value=-1)
    # Of each column, the tokens up to it: L of them, the nearest last.
    up_to_BCL = earlier_BC.unfold(1, LONGEST_MATCH, 1)
    differs_BCL = (up_to_BCL != last_BL.unsqueeze(1)) | (last_BL < 0).unsqueeze(1)
    # A difference in front of all makes the first one from behind the length of the match.
    nearest_first_BCL = nn.functional.pad(differs_BCL, (1, 0), value=True).flip(2)
    return nearest_first_BCL.to(torch.int8).argmax(2).to(window_BW.dtype)


def extend(window_BW: Tensor, run_BC: Tensor, newest_B: Tensor) -> tuple[Tensor, Tensor]:
    """The window with one more token (-1: none), and its runs; both one column wider."""
    newest_B = newest_B.to(window_BW.dtype)
    longer_BC = nn.functional.pad(run_BC, (1, 0)).add_(1).clamp_(max=LONGEST_MATCH)
    equal_BC = (window_BW == newest_B.unsqueeze(1)) & (newest_B >= 0).unsqueeze(1)
    return torch.cat([window_BW, newest_B.unsqueeze(1)], 1), longer_BC * equal_BC


def best_matches(window_BW: Tensor, run_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that followed the R longest matches, the latest first among equals, int64 [B, R].

    And the matches' lengths; where there are fewer matches, token -1 and length 0.
    """
    columns = run_BC.shape[1]
    key_BC = run_BC * columns + torch.arange(columns, dtype=run_BC.dtype, device=run_BC.device)
    key_BR = key_BC.topk(min(MATCHES, columns), dim=1).values
    runs_BR = key_BR // columns
    ids_BR = window_BW.gather(1, (key_BR % columns + 1).long()).long()
    return torch.where(runs_BR > 0, ids_BR, -1), runs_BR


@dataclass(frozen=True)
class Candidates:
    """What may stand at one place: the head's M tokens, then those behind matches."""

    ids_BS: Tensor  # int64; -1: none, or named before
    logp_BM: Tensor  # float32, the head's, of the first M
    run_BS: Tensor  # int64, longest match that the token followed; 0: none
    count_BS: Tensor  # int64, matches of that length that it followed
    share_BS: Tensor  # float32, their share of the longest matches; 0 unless among them
    longest_B: Tensor  # int64, length of the longest match of all


def gather_candidates(
    head_ids_BM: Tensor, head_logp_BM: Tensor, match_ids_BR: Tensor, match_runs_BR: Tensor
) -> Candidates:
    """Join a head's candidates with the tokens behind matches, each token once."""
    ids_BS = torch.cat([head_ids_BM, match_ids_BR], 1)
    longest_B = match_runs_BR[:, 0]  # they come longest first
    same_BSR = (ids_BS.unsqueeze(2) == match_ids_BR.unsqueeze(1)) & (match_ids_BR >= 0).unsqueeze(1)
    run_BS = (same_BSR * match_runs_BR.unsqueeze(1)).amax(2)
    as_long_BSR = same_BSR & (match_runs_BR.unsqueeze(1) == run_BS.unsqueeze(2))
    count_BS = as_long_BSR.sum(2)
    number_B = (match_runs_BR == longest_B.unsqueeze(1)).sum(1)
    share_BS = count_BS / number_B.unsqueeze(1)
    share_BS = share_BS * ((run_BS == longest_B.unsqueeze(1)) & (run_BS > 0))
    # A token behind several matches stays in its first slot; one that the head names, there.
    heads, matches = head_ids_BM.shape[1], match_ids_BR.shape[1]
    earlier_RR = torch.ones(matches, matches, dtype=torch.bool, device=ids_BS.device).tril(-1)
    again_BR = (same_BSR[:, heads:] & earlier_RR).any(2) | same_BSR[:, :heads].any(1)
    kept_BS = torch.cat([head_ids_BM >= 0, ~again_BR], 1)
    return Candidates(
        torch.where(kept_BS, ids_BS, -1), head_logp_BM, run_BS, count_BS, share_BS, longest_B
    )


def scores(candidates: Candidates, weights_F: Tensor) -> Tensor:
    """float32 [B, S + 1]: each candidate's score, and last that of any other token."""
    log_count_BS = candidates.count_BS.clamp(min=1).float().log()
    context_BS = weights_F[MATCH + candidates.run_BS] + weights_F[COUNT] * log_count_BS
    context_BS = context_BS + weights_F[SHARE] * candidates.share_BS
    head_BM = weights_F[SCALE] * candidates.logp_BM
    matches = candidates.ids_BS.shape[1] - head_BM.shape[1]
    head_BS = torch.cat([head_BM, weights_F[FLOOR].expand(head_BM.shape[0], matches)], 1)
    score_BS = (head_BS + context_BS).masked_fill(candidates.ids_BS < 0, _FAR_BELOW)
    other_B1 = weights_F[NONE + candidates.longest_B].unsqueeze(1)
    return torch.cat([score_BS, other_B1], 1)


def choose(candidates: Candidates, weights_F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best candidate of each row: id (int64), confidence (float32, 0..1), slot (int64).

    Equal scores: the first slot. A row without candidates gives id 0 and confidence 0.
    """
    score_BT = scores(candidates, weights_F)
    slot_B = score_BT[:, :-1].argmax(1)
    confidence_B = score_BT.softmax(1).gather(1, slot_B.unsqueeze(1)).squeeze(1)
    ids_B = candidates.ids_BS.gather(1, slot_B.unsqueeze(1)).squeeze(1)
    return ids_B.clamp(min=0), confidence_B, slot_B
