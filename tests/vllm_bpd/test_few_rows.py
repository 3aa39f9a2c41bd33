"""Weights in eight bits: near the exact product, and taken only where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm_bpd.few_rows import MOST_ROWS, FewRowsRounded, RoundedWeight, rounded


def weights(outputs: int, inputs: int) -> torch.Tensor:
    """Rows of very different sizes, one of them nothing."""
    generator = torch.Generator().manual_seed(outputs)
    weight_OI = torch.randn(outputs, inputs, generator=generator)
    weight_OI *= torch.logspace(-3, 3, outputs).unsqueeze(-1)
    weight_OI[outputs // 2] = 0
    return weight_OI.bfloat16()


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (96, 576), (32, 1152)])
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
def test_within_half_a_step_of_each_weight(shape: tuple[int, int], rows: int) -> None:
    weight_OI = weights(*shape)
    x_RI = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
    found_RO = RoundedWeight(weight_OI).product(x_RI)
    assert found_RO.dtype == torch.bfloat16
    exact_RO = x_RI.double() @ weight_OI.double().T
    half_a_step_O = weight_OI.double().abs().amax(dim=-1) / 254
    bound_RO = half_a_step_O * x_RI.double().abs().sum(dim=-1, keepdim=True)
    rounding_RO = exact_RO.abs() * 2**-6  # of the scale and of the result, to bfloat16
    assert ((found_RO.double() - exact_RO).abs() <= bound_RO * 1.02 + rounding_RO).all()
    assert (found_RO[:, shape[0] // 2] == 0).all()


def test_a_row_is_rounded_alike_whatever_lies_beside_it() -> None:
    """Ranks that hold parts of a vocabulary score an id as one rank does."""
    weight_OI = weights(96, 64)
    x_RI = torch.randn(2, 64).bfloat16()
    parts = [RoundedWeight(part).product(x_RI) for part in weight_OI.split([32, 64])]
    torch.testing.assert_close(
        torch.cat(parts, dim=-1), RoundedWeight(weight_OI).product(x_RI), rtol=2**-7, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_as_they_are(dtype: torch.dtype) -> None:
    assert rounded(weights(32, 32).to(dtype)) is None


@pytest.mark.parametrize("shape", [(31, 32), (32, 48), (33, 64), (0, 32)])
def test_sizes_that_the_operator_would_read_past_are_left(shape: tuple[int, int]) -> None:
    assert rounded(torch.ones(shape, dtype=torch.bfloat16)) is None


def test_a_torch_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounded(weights(32, 32)) is not None
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    assert rounded(weights(32, 32)) is None


@pytest.mark.parametrize(("rows", "through"), [(MOST_ROWS, "int8"), (MOST_ROWS + 1, "bfloat16")])
def test_only_few_rows(rows: int, through: str) -> None:
    layer = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    weight = RoundedWeight(layer.weight.data)
    x_RI = torch.randn(rows, 32).bfloat16()
    with torch.inference_mode():
        found_RO = FewRowsRounded(layer, weight)(x_RI)
        products = {"int8": weight.product(x_RI), "bfloat16": layer(x_RI)}
    assert not torch.equal(products["int8"], products["bfloat16"])
    assert torch.equal(found_RO, products[through])
