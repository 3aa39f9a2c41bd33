"""Acceptance by the exact walk: replay recorded greedy answers as the engine would verify them.

The engine samples an answer's first token without drafts. Then, step by step, the heads draft
from the state that the newest token was sampled from, given that token; the longest prefix equal
to the target's own tokens is accepted, and the target adds one token. A step counts when its
drafts were verified, also the answer's last, where drafts past the end are lost:
k-hat = 1 + accepted / steps, as vLLM reports it.

Shape suffixes: T rows (answer tokens) walked, B rows of a batch, K heads, V scored ids, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from heads_training.dataset import Texts, to_draft_ids
from heads_training.target import TargetRows
from vllm_bpd.heads import BlockwiseHeads

_ROWS_AT_ONCE = 1024  # rows drafted together; bounds memory


@dataclass
class WalkCounts:
    """What one walk over some answers counted."""

    steps: int = 0  # draft steps verified
    accepted_at: list[int] = field(default_factory=list)  # accepted drafts, by draft position

    @property
    def k_hat(self) -> float:
        """Mean accepted block, tokens: 1 + accepted drafts / steps; 1 without any step."""
        return 1 + sum(self.accepted_at) / max(self.steps, 1)

    def report(self) -> dict[str, object]:
        """Plain figures for JSON; rates are shares of steps, 0..1."""
        return {
            "k_hat": round(self.k_hat, 4),
            "steps": self.steps,
            "accepted": sum(self.accepted_at),
            "acceptance_by_position": [
                round(count / max(self.steps, 1), 4) for count in self.accepted_at
            ],
        }


def frozen_rows(
    target: TargetRows, draft_ids_V: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(embedding [W, D], LM head of the draft vocabulary [V, D]), contiguous, in `dtype`."""
    head_VD = target.lm_head_VD if draft_ids_V is None else target.lm_head_VD[draft_ids_V]
    return target.embedding_VD.to(dtype).contiguous(), head_VD.to(dtype).contiguous()


@torch.inference_mode()
def match_rows(
    heads: BlockwiseHeads,
    texts: Texts,
    rows_T: Tensor,
    target: TargetRows,
    draft_ids_V: Tensor | None,
) -> Tensor:
    """[T, K] bool: whether each head's draft at `rows_T` is the target's token.

    Computes in the heads' dtype; give bf16 heads for what a bf16 engine would draft. Equal scores:
    the lowest id.
    """
    weight = heads.hidden_layer.weight
    assert isinstance(weight, Tensor)
    embedding_WD, head_VD = frozen_rows(target, draft_ids_V, weight.dtype)
    labels_TK = to_draft_ids(texts.next_TK, draft_ids_V, target.fingerprint.vocab_size)
    conditioned = heads.config.conditioning == "sampled_token"
    matches = []
    for rows_B in rows_T.split(_ROWS_AT_ONCE):
        hidden_BD = texts.gather(rows_B).to(weight.dtype)
        embedding_BD = embedding_WD[texts.sampled_T[rows_B]] if conditioned else None
        states_BKD = heads(hidden_BD, embedding_BD)
        drafts = [(states_BKD[:, i] @ head_VD.T).argmax(-1) for i in range(heads.num_heads)]
        matches.append(torch.stack(drafts, 1) == labels_TK[rows_B, : heads.num_heads])
    return torch.cat(matches)


def walk(match_TK: Tensor, lengths: list[int], num_drafts: int) -> WalkCounts:
    """Walk over answers of `lengths` tokens, whose rows of `match_TK` lie one after the other.

    Uses the first `num_drafts` heads, that is k = num_drafts + 1. Labels past an answer's end
    match nothing, so no row accepts more than the answer has left.
    """
    accepted = match_TK[:, :num_drafts].long().cumprod(1).sum(1).tolist()
    steps_by_accepted = [0] * (num_drafts + 1)
    first = 0
    for length in lengths:
        row = 0
        while row < length - 1:  # nothing is drafted once the last token is sampled
            taken = accepted[first + row]
            steps_by_accepted[taken] += 1
            row += taken + 1
        first += length
    return WalkCounts(
        sum(steps_by_accepted), [sum(steps_by_accepted[i + 1 :]) for i in range(num_drafts)]
    )


def walk_report(
    match_TK: Tensor, texts: Texts, rows_T: Tensor, groups: dict[str, list[str]]
) -> dict[str, object]:
    """Figures for every k, and at the largest for every group of sources, of the rows' answers.

    `rows_T` are whole answers in order, as `split_rows` gives them; `groups` maps a group's name
    to the sources in it.
    """
    records, lengths_R = texts.record_T[rows_T].unique_consecutive(return_counts=True)
    sources, lengths = [texts.sources[r] for r in records.tolist()], lengths_R.tolist()
    parts = match_TK.split(lengths)
    num_drafts = match_TK.shape[1]

    def chosen(names: list[str]) -> dict[str, object]:
        inside = [i for i, source in enumerate(sources) if source in names]
        counts = walk(
            torch.cat([parts[i] for i in inside]), [lengths[i] for i in inside], num_drafts
        )
        return {"answers": len(inside), **counts.report()}

    return {
        "answers": len(lengths),
        "answer_tokens": len(rows_T),
        "by_k": {str(k + 1): walk(match_TK, lengths, k).report() for k in range(1, num_drafts + 1)},
        "by_source": {source: chosen([source]) for source in sorted(set(sources))},
        "by_group": {
            name: chosen(members)
            for name, members in sorted(groups.items())
            if set(members) & set(sources)
        },
    }
