"""Fits the weights of `vllm_bpd.lattice` to held-out answers, and drafts with them offline.

Teacher-forced: at each row and place the text before it is the target's own, as it is in serving
whenever the draft counts. A few dozen weights a place, so a few thousand answer tokens suffice.

Shape suffixes: T rows (answer tokens), N those of one text, K heads, M candidates of a head,
R matches, P places of the block, F weights, B rows of a batch, V scored ids, Q columns searched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vllm_bpd.lattice as lattice
from heads_training.dataset import Texts
from heads_training.target import TargetRows
from heads_training.walk import frozen_rows
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import explain_mismatch
from vllm_bpd.heads import BlockwiseHeads

_ROWS_AT_ONCE = 1024  # rows scored together; bounds memory
_ITERATIONS = 60  # of L-BFGS; it stops earlier where nothing changes
_DECAY = 1e-4  # pulls weights of lengths that are never seen to their start


@dataclass(frozen=True)
class Lattice:
    """Candidates at every row and place of some whole answers, and the tokens that are right."""

    head_ids_TKM: Tensor  # int64
    head_logp_TKM: Tensor  # float32
    match_ids_TR: Tensor  # int64, behind matches of the text up to the token a row samples
    match_runs_TR: Tensor  # int64
    right_TP: Tensor  # int64, the target's tokens; negative past the answer's end

    def at(self, rows_B: Tensor, place: int) -> lattice.Candidates:
        """Candidates of `rows_B` at `place`, given that all before it are right."""
        heads = self.head_ids_TKM.shape[1]
        head = min(place, heads - 1)
        ids_BM = self.head_ids_TKM[rows_B, head]
        if place >= heads:
            ids_BM = torch.full_like(ids_BM, -1)
        # A row behind the answer's end has no right token, so whose matches it sees is the same.
        seen_B = (rows_B + place).clamp(max=self.match_ids_TR.shape[0] - 1)
        return lattice.gather_candidates(
            ids_BM,
            self.head_logp_TKM[rows_B, head],
            self.match_ids_TR[seen_B],
            self.match_runs_TR[seen_B],
        )


def text_matches(prompt_ids: Tensor, answer_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and lengths, int64 [N, R], of the matches behind each answer token of one text.

    Takes int64 ids. Row i sees the prompt and the answer up to its token i, that included.
    """
    window_1Q = torch.cat([prompt_ids, answer_ids[:1]]).unsqueeze(0)
    run_1Q = lattice.match_runs(window_1Q)
    ids_NR = torch.full((len(answer_ids), lattice.MATCHES), -1)
    runs_NR = torch.zeros(len(answer_ids), lattice.MATCHES, dtype=torch.int64)
    for i in range(len(answer_ids)):
        if i:
            window_1Q, run_1Q = lattice.extend(window_1Q, run_1Q, answer_ids[i : i + 1])
        found_1R, length_1R = lattice.best_matches(window_1Q, run_1Q)
        ids_NR[i, : found_1R.shape[1]] = found_1R[0]
        runs_NR[i, : found_1R.shape[1]] = length_1R[0]
    return ids_NR, runs_NR


@torch.inference_mode()
def head_candidates(
    heads: BlockwiseHeads,
    texts: Texts,
    rows_T: Tensor,
    target: TargetRows,
    draft_ids_V: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The most probable ids (int64) of every head and their log probabilities, [T, K, M]."""
    weight = heads.hidden_layer.weight
    assert isinstance(weight, Tensor)
    embedding_WD, head_VD = frozen_rows(target, draft_ids_V, weight.dtype)
    count = min(lattice.CANDIDATES, head_VD.shape[0])
    ids, logp = [], []
    for rows_B in rows_T.split(_ROWS_AT_ONCE):
        hidden_BD = texts.gather(rows_B).to(weight.dtype)
        conditioned = heads.config.conditioning == "sampled_token"
        embedding_BD = embedding_WD[texts.sampled_T[rows_B]] if conditioned else None
        states_BKD = heads(hidden_BD, embedding_BD)
        for head in range(heads.num_heads):
            logits_BV = (states_BKD[:, head] @ head_VD.T).float()
            top = logits_BV.topk(count)
            logp.append(top.values - logits_BV.logsumexp(1, keepdim=True))
            ids.append(top.indices if draft_ids_V is None else draft_ids_V[top.indices])
    shape = (-1, heads.num_heads)

    def joined(parts: list[Tensor]) -> Tensor:
        by_head = [torch.cat(parts[head :: heads.num_heads]) for head in range(shape[1])]
        return torch.stack(by_head, 1)

    return joined(ids), joined(logp)


def right_tokens(answer_ids: Tensor, places: int) -> Tensor:
    """int64 [N, P]: the target's token at each place of the block drafted at each row; -1: none.

    Row 0 is the state that the answer's first token was sampled from.
    """
    ends_N = nn.functional.pad(answer_ids, (0, places), value=-1)
    return torch.stack([ends_N[1 + p : 1 + p + len(answer_ids)] for p in range(places)], 1)


def make_lattice(
    heads: BlockwiseHeads,
    texts: Texts,
    rows_T: Tensor,
    target: TargetRows,
    draft_ids_V: Tensor | None,
    places: int,
) -> Lattice:
    """Candidates at `rows_T`, which are whole answers in order. Computes in the heads' dtype.

    Raises HeadsError for heads of another target, and where there are no rows.
    """
    mismatch = explain_mismatch(heads.config.target, target.fingerprint)
    if mismatch:
        raise HeadsError(f"heads: {mismatch}")
    if not len(rows_T):
        raise HeadsError(
            "answers: found none to draft for; expected more, so that some are held out"
        )
    head_ids_TKM, head_logp_TKM = head_candidates(heads, texts, rows_T, target, draft_ids_V)
    match_ids, match_runs, right = [], [], []
    for record in texts.record_T[rows_T].unique_consecutive().tolist():
        ids_N = texts.ids[record].long()
        length = int(texts.answer_lengths_R[record])
        prompt_ids, answer_ids = ids_N[:-length], ids_N[-length:]
        ids_NR, runs_NR = text_matches(prompt_ids, answer_ids)
        match_ids.append(ids_NR)
        match_runs.append(runs_NR)
        right.append(right_tokens(answer_ids, places))
    return Lattice(
        head_ids_TKM,
        head_logp_TKM,
        torch.cat(match_ids),
        torch.cat(match_runs),
        torch.cat(right),
    )


def initial_weights() -> Tensor:
    """float32 [F]: where fitting starts, and what weights no text tells about keep."""
    weights_F = torch.zeros(lattice.NUM_WEIGHTS)
    weights_F[lattice.SCALE], weights_F[lattice.FLOOR] = 1.0, -6.0
    weights_F[lattice.MATCH : lattice.NONE] = torch.linspace(0, 6, lattice.LONGEST_MATCH + 1)
    return weights_F


def fit_weights(rows: Lattice, places: int) -> Tensor:
    """float32 [P, F], fitted place by place by maximum likelihood of the target's tokens."""
    return torch.stack([_fit_place(rows, place) for place in range(places)])


def _fit_place(rows: Lattice, place: int) -> Tensor:
    right_T = rows.right_TP[:, place]
    rows_B = (right_T >= 0).nonzero().flatten()
    start_F = initial_weights()
    if not len(rows_B):
        return start_F
    candidates = rows.at(rows_B, place)
    found_BS = candidates.ids_BS == right_T[rows_B].unsqueeze(1)
    slot_B = torch.where(found_BS.any(1), found_BS.int().argmax(1), found_BS.shape[1])
    weights_F = start_F.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights_F], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(lattice.scores(candidates, weights_F), slot_B)
        loss = loss + _DECAY * (weights_F - start_F).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights_F.detach()


@dataclass(frozen=True)
class Drafted:
    """What the lattice drafts at every row, each place given that all before it are right."""

    match_TP: Tensor  # bool, the draft is the target's token
    confidence_TP: Tensor  # float32, 0..1
    from_context_TP: Tensor  # bool

    def at(self, rows_T: Tensor) -> Drafted:
        """The drafts at some rows: indices, or a bool for each."""
        return Drafted(
            self.match_TP[rows_T], self.confidence_TP[rows_T], self.from_context_TP[rows_T]
        )

    def kept(self, min_confidence: float) -> Tensor:
        """bool [T, P]: drafts before the one at which confidence falls below the threshold."""
        return (self.confidence_TP.cumprod(1) >= max(min_confidence, 1e-9)).cummin(1).values


@torch.inference_mode()
def draft_rows(rows: Lattice, weights_PF: Tensor) -> Drafted:
    """Draft at all rows with `weights_PF`."""
    match, confidence, context = [], [], []
    heads = rows.head_ids_TKM.shape[1]
    for place, weights_F in enumerate(weights_PF):
        for rows_B in torch.arange(len(rows.right_TP)).split(8 * _ROWS_AT_ONCE):
            ids_B, confidence_B, slot_B = lattice.choose(rows.at(rows_B, place), weights_F)
            match.append(ids_B == rows.right_TP[rows_B, place])
            confidence.append(confidence_B)
            context.append(slot_B > 0 if place < heads else slot_B >= 0)
    parts = len(match) // len(weights_PF)

    def placed(found: list[Tensor]) -> Tensor:
        columns = [torch.cat(found[i : i + parts]) for i in range(0, len(found), parts)]
        return torch.stack(columns, 1)

    return Drafted(placed(match), placed(confidence), placed(context))
