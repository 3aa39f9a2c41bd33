"""What heads are trained towards: the target's greedy tokens, and its probabilities for them.

Both are sparse weights over the draft vocabulary, so one cross-entropy covers them: for a row,
the greedy token's weight is 1 - `distillation`, and the target's most probable tokens share
`distillation` in proportion to their probabilities.

Shape suffixes: T rows of all texts, B rows of a batch, K heads, V scored ids, D hidden size,
M soft labels a row, S = M + 1 labels a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads_training.dataset import IGNORED, Texts

SOFT_LABELS = 16  # most probable tokens kept; SmolLM2's hold over nine tenths of the probability
_ROWS_AT_ONCE = 2048  # rows whose logits are made together; bounds memory


@dataclass(frozen=True)
class SoftLabels:
    """The target's most probable next tokens at every row, as rows of the draft vocabulary."""

    ids_TM: Tensor  # int32
    weights_TM: Tensor  # float16, each row sums to 1


def soft_labels(texts: Texts, lm_head_VD: Tensor, count: int = SOFT_LABELS) -> SoftLabels:
    """What the target itself gives each token, from the cached states and `lm_head_VD` [V, D]."""
    from tqdm import tqdm

    count = min(count, lm_head_VD.shape[0])
    ids, weights = [], []
    for rows_B in tqdm(torch.arange(texts.rows).split(_ROWS_AT_ONCE), desc="soft labels"):
        logits_BV = (texts.gather(rows_B).to(lm_head_VD.dtype) @ lm_head_VD.T).float()
        top = logits_BV.topk(count, dim=-1)
        ids.append(top.indices.int())
        weights.append(top.values.softmax(-1).half())
    return SoftLabels(torch.cat(ids), torch.cat(weights))


def sparse_targets(
    labels_TK: Tensor, soft: SoftLabels | None, rows_B: Tensor, head: int, distillation: float
) -> tuple[Tensor, Tensor]:
    """Ids [B, S] int64 and weights [B, S] float32 of `head` at `rows_B`; 0 where it has no label.

    The token that `head` drafts at row r is the one the target samples at row r + 1 + head.
    """
    hard_B = labels_TK[rows_B, head]
    valid_B = hard_B != IGNORED
    ids_BS, weights_BS = hard_B.clamp(min=0).unsqueeze(1), valid_B.float().unsqueeze(1)
    if soft is None or distillation == 0:
        return ids_BS, weights_BS
    # Clamped rows lie behind the last text's end, where no label is valid anyway.
    teacher_B = (rows_B + 1 + head).clamp(max=soft.ids_TM.shape[0] - 1)
    soft_BM = soft.weights_TM[teacher_B].float() * valid_B.unsqueeze(1)
    return (
        torch.cat([ids_BS, soft.ids_TM[teacher_B].long()], dim=1),
        torch.cat([(1 - distillation) * weights_BS, distillation * soft_BM], dim=1),
    )


def sparse_cross_entropy(logits_BV: Tensor, ids_BS: Tensor, weights_BS: Tensor) -> Tensor:
    """Mean over rows with a label of -sum(weight * log probability); float32, a scalar."""
    logits_BV = logits_BV.float()
    row_weight_B = weights_BS.sum(1)
    picked_B = (weights_BS * logits_BV.gather(1, ids_BS)).sum(1)
    loss_B = row_weight_B * logits_BV.logsumexp(1) - picked_B
    return loss_B.sum() / row_weight_B.sum().clamp(min=1)
