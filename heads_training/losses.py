"""What heads are trained towards, and the cross-entropy that pulls them there.

Labels are the target's greedy tokens, and its probabilities for them. Both are sparse weights
over the scored vocabulary, so one cross-entropy covers them: for a row, the greedy token's weight
is 1 - `distillation`, and the target's most probable tokens share `distillation` in proportion
to their probabilities. Up to a constant that is the KL divergence from those probabilities.

Logits are made for a bounded chunk of rows, and their gradient is taken at once, so that no tensor
of all rows times the vocabulary ever exists, and nothing is computed twice.

Shape suffixes: T rows of all texts, R rows of a batch, V scored ids, D hidden size, M soft labels
a row, S = M + 1 labels a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads_training.dataset import IGNORED, Texts

SOFT_LABELS = 16  # most probable tokens kept; SmolLM2's hold over nine tenths of the probability
_ROWS_AT_ONCE = 2048  # rows whose soft labels are made together; bounds memory


@dataclass(frozen=True)
class SoftLabels:
    """The target's most probable next tokens at every row, as rows of the draft vocabulary."""

    ids_TM: Tensor  # int32
    weights_TM: Tensor  # float16, each row sums to 1


def soft_labels(texts: Texts, lm_head_VD: Tensor, count: int = SOFT_LABELS) -> SoftLabels:
    """What the target itself gives each token, from the cached states and `lm_head_VD` [V, D].

    Made where `lm_head_VD` lies; the result is on the CPU.
    """
    from tqdm import tqdm

    count, device = min(count, lm_head_VD.shape[0]), lm_head_VD.device
    ids, weights = [], []
    for rows_R in tqdm(torch.arange(texts.rows).split(_ROWS_AT_ONCE), desc="soft labels"):
        hidden_RD = texts.gather(rows_R).to(device, lm_head_VD.dtype)
        top = (hidden_RD @ lm_head_VD.T).float().topk(count, dim=-1)
        ids.append(top.indices.int().cpu())
        weights.append(top.values.softmax(-1).half().cpu())
    return SoftLabels(torch.cat(ids), torch.cat(weights))


def sparse_targets(
    labels_TK: Tensor, soft: SoftLabels | None, rows_R: Tensor, head: int, distillation: float
) -> tuple[Tensor, Tensor]:
    """Ids [R, S] int64 and weights [R, S] float32 of `head` at `rows_R`; 0 where it has no label.

    The token that `head` drafts at row r is the one the target samples at row r + 1 + head.
    """
    hard_R = labels_TK[rows_R, head]
    valid_R = hard_R != IGNORED
    ids_RS, weights_RS = hard_R.clamp(min=0).unsqueeze(1), valid_R.float().unsqueeze(1)
    if soft is None or distillation == 0:
        return ids_RS, weights_RS
    # Clamped rows lie behind the last text's end, where no label is valid anyway.
    teacher_R = (rows_R + 1 + head).clamp(max=soft.ids_TM.shape[0] - 1)
    soft_RM = soft.weights_TM[teacher_R].float() * valid_R.unsqueeze(1)
    return (
        torch.cat([ids_RS, soft.ids_TM[teacher_R].long()], dim=1),
        torch.cat([(1 - distillation) * weights_RS, distillation * soft_RM], dim=1),
    )


def score_and_loss(
    states_RD: Tensor, ids_RS: Tensor, weights_RS: Tensor, lm_head_VD: Tensor
) -> Tensor:
    """Sum over rows of -sum(weight * log probability); float32, a scalar.

    The one place where a head's logits and its loss are made: a further term of the score belongs
    here, with its tensors as further arguments of `chunked_loss`.
    """
    return sparse_cross_entropy(states_RD @ lm_head_VD.T, ids_RS, weights_RS)


def sparse_cross_entropy(logits_RV: Tensor, ids_RS: Tensor, weights_RS: Tensor) -> Tensor:
    """Sum over rows of -sum(weight * log probability), of float logits; float32, a scalar."""
    loss: Tensor = _SparseCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_RV, ids_RS, weights_RS
    )
    return loss


class _SparseCrossEntropy(torch.autograd.Function):
    """Its gradient is made in the place of the log probabilities, in three passes over them.

    By torch's own operations it would take six, and twice the memory.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, ids_RS: Tensor, weights_RS: Tensor) -> Tensor:
        log_RV = logits_RV.float().log_softmax(1)
        ctx.dtype = logits_RV.dtype
        ctx.save_for_backward(log_RV, ids_RS, weights_RS)
        return -(weights_RS * log_RV.gather(1, ids_RS)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_RV, ids_RS, weights_RS = ctx.saved_tensors
        weights_RS = weights_RS * grad
        slope_RV = log_RV.exp_().mul_(weights_RS.sum(1, keepdim=True))
        slope_RV.scatter_add_(1, ids_RS, -weights_RS)
        return slope_RV.to(ctx.dtype), None, None


def chunked_loss(
    by_row: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    chunk: int,
    function: Callable[..., Tensor] = score_and_loss,
) -> Tensor:
    """`function(*by_row, *shared)`, a sum over rows, made for `chunk` rows at a time.

    `by_row` tensors have the rows as their first dimension; gradients reach every float tensor
    of both. Peak memory beside inputs and their gradients is one chunk's.
    """
    total: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
        function, chunk, torch.is_grad_enabled(), len(by_row), *by_row, *shared
    )
    return total


class _ChunkedSum(torch.autograd.Function):
    """Takes each chunk's gradient in the forward pass, while its logits exist.

    Recomputing them in the backward pass would need no more memory, but a third more products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        chunk: int,
        with_grad: bool,
        num_by_row: int,
        *tensors: Tensor,
    ) -> Tensor:
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[4:]]
        # Shared gradients are summed over chunks, in float32; those of rows are put in place.
        grads = [
            torch.zeros_like(t, dtype=t.dtype if i < num_by_row else torch.float32) if w else None
            for i, (t, w) in enumerate(zip(tensors, wanted, strict=True))
        ]
        total = torch.zeros((), device=tensors[0].device)
        for begin in range(0, tensors[0].shape[0], chunk):
            leaves = [
                (t[begin : begin + chunk] if i < num_by_row else t).detach().requires_grad_(w)
                for i, (t, w) in enumerate(zip(tensors, wanted, strict=True))
            ]
            with torch.enable_grad():
                loss = function(*leaves)
            total += loss.detach()
            if not any(wanted):
                continue
            found = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))
            for i, grad in enumerate(grads):
                if grad is not None and i < num_by_row:
                    grad[begin : begin + chunk] = next(found)
                elif grad is not None:
                    grad += next(found)
        ctx.wanted = wanted
        ctx.save_for_backward(
            *(g.to(t.dtype) for g, t in zip(grads, tensors, strict=True) if g is not None)
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        return (
            None, None, None, None,
            *(grad.to(g.dtype) * g if (g := next(saved) if w else None) is not None else None
              for w in ctx.wanted),
        )  # fmt: skip
