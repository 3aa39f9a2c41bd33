"""Acceptance by the exact walk: replay recorded greedy answers as the engine would verify them.

The engine samples an answer's first token without drafts. Then, step by step, the heads draft
from the state that the newest token was sampled from, given that token; the longest prefix equal
to the target's own tokens is accepted, and the target adds one token. A step counts when its
drafts were verified, also the answer's last, where drafts past the end are lost:
k-hat = 1 + accepted / steps, as vLLM reports it.

Shape suffixes: T rows (answer tokens) walked, S those of a group, B rows of a batch, R answers,
K heads, V scored ids, W whole vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads_training.dataset import IGNORED, Texts, to_draft_ids
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


def head_accuracy(match_TK: Tensor, next_TK: Tensor) -> list[dict[str, float]]:
    """For each head, over all rows whose answer reaches far enough, shares in 0..1.

    `marginal`: it is right. `cumulative`: it and every head before it are right. `conditional`:
    it is right where every head before it is. A walk visits other rows more often than these
    shares do: k-hat is not their sum. `next_TK` (int64) are the tokens to be drafted.
    """
    accuracy = []
    for head in range(match_TK.shape[1]):
        match_SK = match_TK[next_TK[:, head] != IGNORED]
        before_S = match_SK[:, :head].all(1)
        right_S = match_SK[:, head]
        shares = {
            "marginal": (right_S.sum(), len(match_SK)),
            "conditional": (right_S[before_S].sum(), int(before_S.sum())),
            "cumulative": ((right_S & before_S).sum(), len(match_SK)),
        }
        accuracy.append(
            {"rows": len(match_SK)}
            | {name: round(float(hits) / max(of, 1), 4) for name, (hits, of) in shares.items()}
        )
    return accuracy


def walk_report(match_TK: Tensor, texts: Texts, rows_T: Tensor) -> dict[str, object]:
    """Figures for every head, every k, and for every source and group of sources.

    `rows_T` are whole answers in order, as `split_rows` gives them. A source's group is what
    stands before its first colon.
    """
    records_R, lengths_R = texts.record_T[rows_T].unique_consecutive(return_counts=True)
    sources, lengths = [texts.sources[r] for r in records_R.tolist()], lengths_R.tolist()
    parts = match_TK.split(lengths)
    num_drafts = match_TK.shape[1]

    def chosen(inside: list[int]) -> dict[str, object]:
        match_SK = torch.cat([parts[i] for i in inside])
        counts = walk(match_SK, [lengths[i] for i in inside], num_drafts)
        by_k = {
            str(k + 1): round(walk(match_SK, [lengths[i] for i in inside], k).k_hat, 4)
            for k in range(1, num_drafts + 1)
        }
        return {"answers": len(inside), **counts.report(), "k_hat_by_k": by_k}

    def grouped(names: list[str]) -> dict[str, object]:
        return {
            name: chosen([i for i, found in enumerate(names) if found == name])
            for name in sorted(set(names))
        }

    return {
        "answers": len(lengths),
        "answer_tokens": len(rows_T),
        "by_head": head_accuracy(match_TK, texts.next_TK[rows_T, :num_drafts]),
        "by_k": {str(k + 1): walk(match_TK, lengths, k).report() for k in range(1, num_drafts + 1)},
        "by_group": grouped([source.split(":")[0] for source in sources]),
        "by_source": grouped(sources),
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as text: a line for every head, k, group and source."""
    lines = [f"{'accuracy of head':44} {'rows':>16} {'alone':>6}  {'cond.':>6}  {'cumul.':>6}"]
    for number, row in enumerate(report["by_head"], start=1):
        name = f"head {number}, {number + 1} tokens ahead"
        rates = "  ".join(f"{row[rate]:6.3f}" for rate in ("marginal", "conditional", "cumulative"))
        lines.append(f"{name:44} {row['rows']:16d} {rates}")
    lines += [
        "",
        f"{'':44} {'answers':>7} {'steps':>8} {'k-hat':>6}  accepted at position 1, 2, ...",
    ]
    lines += [_line(f"k = {k}", report["answers"], row) for k, row in report["by_k"].items()]
    for title, key in (("group", "by_group"), ("source", "by_source")):
        lines += [
            _line(f"{title} {name!r}"[:44], row["answers"], row)
            for name, row in report[key].items()
        ]
    return "\n".join(lines)


def _line(name: str, answers: int, row: dict[str, Any]) -> str:
    rates = "  ".join(f"{rate:.3f}" for rate in row["acceptance_by_position"])
    return f"{name:44} {answers:7d} {row['steps']:8d} {row['k_hat']:6.3f}  {rates}"
