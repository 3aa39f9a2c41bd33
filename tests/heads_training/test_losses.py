"""Labels hard and soft, and a loss in chunks that is the plain one, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads_training import losses
from heads_training.dataset import IGNORED
from heads_training.train import TrainingData


def test_sparse_targets(tiny_data: TrainingData) -> None:
    assert tiny_data.soft is not None
    rows_R = torch.arange(30)
    for head in range(3):
        ids_RS, weights_RS = losses.sparse_targets(
            tiny_data.labels_TK, tiny_data.soft, rows_R, head, 0.25
        )
        valid_R = tiny_data.labels_TK[rows_R, head] != IGNORED
        torch.testing.assert_close(weights_RS.sum(1), valid_R.float(), rtol=1e-3, atol=1e-3)
        # The target's most probable token of the drafted position is the one it said.
        said_R = tiny_data.labels_TK[rows_R[valid_R], head]
        assert (ids_RS[valid_R, 1] == said_R).float().mean() > 0.9


def test_hard_labels_give_cross_entropy(tiny_data: TrainingData) -> None:
    rows_R, lm_head_VD = torch.arange(30), torch.randn(80, 64)
    states_RD = torch.randn(30, 64)
    ids_RS, weights_RS = losses.sparse_targets(tiny_data.labels_TK, None, rows_R, 0, 0.25)
    expected = torch.nn.functional.cross_entropy(
        states_RD @ lm_head_VD.T,
        tiny_data.labels_TK[rows_R, 0],
        ignore_index=IGNORED,
        reduction="sum",
    )
    found = losses.score_and_loss(states_RD, ids_RS, weights_RS, lm_head_VD)
    torch.testing.assert_close(found, expected)


def test_soft_labels_give_the_divergence() -> None:
    """With every label kept, the gradient is that of the KL divergence from the target's own."""
    generator = torch.Generator().manual_seed(0)
    teacher_RV, logits_RV = (torch.randn(5, 16, generator=generator) for _ in range(2))
    ids_RV = torch.arange(16).expand(5, 16)
    states_RV, other_RV = (logits_RV.clone().requires_grad_() for _ in range(2))
    losses.score_and_loss(states_RV, ids_RV, teacher_RV.softmax(1), torch.eye(16)).backward()
    torch.nn.functional.kl_div(
        other_RV.log_softmax(1), teacher_RV.softmax(1), reduction="sum"
    ).backward()
    torch.testing.assert_close(states_RV.grad, other_RV.grad)


@pytest.mark.parametrize("chunk", [1, 7, 20, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def made() -> tuple[Tensor, Tensor]:
        generator.manual_seed(0)
        states_RD = torch.randn(20, 8, generator=generator).requires_grad_()
        return states_RD, torch.randn(30, 8, generator=generator).requires_grad_()

    ids_RS = torch.randint(0, 30, (20, 3), generator=generator)
    weights_RS = torch.rand(20, 3, generator=generator)
    (plain_RD, plain_VD), (states_RD, lm_head_VD) = made(), made()
    expected = losses.score_and_loss(plain_RD, ids_RS, weights_RS, plain_VD)
    found = losses.chunked_loss((states_RD, ids_RS, weights_RS), (lm_head_VD,), chunk)
    torch.testing.assert_close(found, expected)
    (3 * expected).backward()
    (3 * found).backward()
    torch.testing.assert_close(states_RD.grad, plain_RD.grad)
    torch.testing.assert_close(lm_head_VD.grad, plain_VD.grad)
    with torch.no_grad():
        again = losses.chunked_loss((states_RD, ids_RS, weights_RS), (lm_head_VD,), chunk)
    assert torch.equal(again, found)


def test_a_further_term_gets_its_gradient() -> None:
    states_RD, bias_V = torch.randn(6, 4).requires_grad_(), torch.randn(9).requires_grad_()

    def function(states_RD: Tensor, ids_R: Tensor, lm_head_VD: Tensor, bias_V: Tensor) -> Tensor:
        logits_RV = states_RD @ lm_head_VD.T + bias_V
        return torch.nn.functional.cross_entropy(logits_RV, ids_R, reduction="sum")

    given = (states_RD, torch.arange(6)), (torch.randn(9, 4), bias_V)
    losses.chunked_loss(*given, 2, function).backward()
    assert bias_V.grad is not None
    found_V = bias_V.grad.clone()
    bias_V.grad = None
    function(*given[0], *given[1]).backward()
    torch.testing.assert_close(found_V, bias_V.grad)
