"""The heads in plain torch: shapes, conditioning, where training starts, and positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.vllm_bpd.samples import HIDDEN, heads_config, random_heads
from vllm_bpd.heads import BlockwiseHeads, drafted_position, sampled_position

ROWS = 5


def rows(seed: int = 0, count: int = ROWS) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def output_weight(heads: BlockwiseHeads) -> Tensor:
    weight = heads.output_layer.weight
    assert isinstance(weight, Tensor)
    return weight


def hidden_weight(heads: BlockwiseHeads) -> Tensor:
    weight = heads.hidden_layer.weight
    assert isinstance(weight, Tensor)
    return weight


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("conditioning", ["none", "sampled_token"])
def test_each_row_gets_a_state_a_head(activation: str, conditioning: str) -> None:
    heads = random_heads(heads_config(activation=activation, conditioning=conditioning))
    embedding = rows(1) if conditioning == "sampled_token" else None
    assert heads(rows(), embedding).shape == (ROWS, 3, HIDDEN)
    assert heads(rows(count=0), None if embedding is None else rows(count=0)).shape[0] == 0
    assert {name: tuple(p.shape) for name, p in heads.named_parameters()} == {
        "hidden_layer.weight": (24, 32 if embedding is not None else 16),
        "output_layer.weight": (3 * HIDDEN, 24),
    }


def test_the_forward_pass_is_the_papers() -> None:
    """Joint hidden layer, each head's slice of the output layer, residual to the hidden state."""
    heads = random_heads(heads_config())
    hidden_BD, embedding_BD = rows(), rows(1)
    scale_B1 = embedding_BD.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    input_BE = torch.cat([hidden_BD, embedding_BD * scale_B1], -1)
    joint_BF = nn.functional.silu(input_BE @ hidden_weight(heads).T)
    for head in range(3):
        slice_DF = output_weight(heads)[head * HIDDEN : (head + 1) * HIDDEN]
        expected_BD = hidden_BD + joint_BF @ slice_DF.T
        torch.testing.assert_close(heads(hidden_BD, embedding_BD)[:, head], expected_BD)


@pytest.mark.parametrize(
    ("conditioning", "embedding", "found"),
    [("none", rows(1), "found one"), ("sampled_token", None, "found none")],
)
def test_the_embedding_is_given_exactly_when_it_is_read(
    conditioning: str, embedding: Tensor | None, found: str
) -> None:
    heads = random_heads(heads_config(conditioning=conditioning))
    with pytest.raises(ValueError, match=f"embedding: {found}; conditioning is '{conditioning}'"):
        heads(rows(), embedding)


@pytest.mark.parametrize("conditioning", ["none", "sampled_token"])
def test_training_starts_with_every_head_equal_to_the_target(conditioning: str) -> None:
    heads = random_heads(heads_config(conditioning=conditioning))
    heads.reset_parameters(torch.Generator().manual_seed(0))
    states_BKD = heads(rows(), rows(1) if conditioning == "sampled_token" else None)
    assert torch.equal(states_BKD, rows().unsqueeze(1).expand(-1, 3, -1))
    # Were the hidden layer zero, too, nothing would ever be learnt.
    assert not torch.equal(hidden_weight(heads) * 0, hidden_weight(heads))


def test_the_start_depends_on_the_generator_alone() -> None:
    made: list[Tensor] = []
    for seed in (0, 0, 1):
        heads = random_heads(heads_config(), seed=len(made))
        heads.reset_parameters(torch.Generator().manual_seed(seed))
        made.append(heads.state_dict()["hidden_layer.weight"])
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_heads_are_the_first_of_all(count: int) -> None:
    full = random_heads(heads_config())
    fewer = BlockwiseHeads(full.config, num_heads=count)
    fewer.load_state_dict(
        full.state_dict() | {"output_layer.weight": output_weight(full)[: count * HIDDEN]}
    )
    assert torch.equal(fewer(rows(), rows(1)), full(rows(), rows(1))[:, :count])


@pytest.mark.parametrize("scale", [0.5, 3.0, 48.0, 1000.0])
def test_the_scale_of_the_embedding_does_not_matter(scale: float) -> None:
    heads = random_heads(heads_config())
    torch.testing.assert_close(
        heads(rows(), rows(1) * scale), heads(rows(), rows(1)), rtol=1e-4, atol=1e-5
    )


def test_an_embedding_of_zeros_is_no_nan() -> None:
    assert bool(random_heads(heads_config())(rows(), rows() * 0).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_states_keep_the_dtype(dtype: torch.dtype) -> None:
    heads = random_heads(heads_config()).to(dtype)
    assert heads(rows().to(dtype), rows(1).to(dtype)).dtype == dtype


def test_rows_do_not_touch_each_other() -> None:
    heads = random_heads(heads_config()).double()
    whole = heads(rows().double(), rows(1).double())
    for row in range(ROWS):
        one = heads(rows().double()[row : row + 1], rows(1).double()[row : row + 1])
        torch.testing.assert_close(one[0], whole[row])


def test_layers_are_made_as_they_are_asked_for() -> None:
    asked: list[tuple[int, int]] = []

    def make(size: int, out: int) -> nn.Module:
        asked.append((size, out))
        return nn.Linear(size, out, bias=False)

    BlockwiseHeads(heads_config(), make_hidden=make, make_output=make, num_heads=2)
    assert asked == [(2 * HIDDEN, 24), (24, 2 * HIDDEN)]


@given(position=st.integers(0, 10**6), head=st.integers(0, 63))
@settings(max_examples=30)
def test_the_first_head_drafts_the_token_behind_the_sampled_one(position: int, head: int) -> None:
    assert sampled_position(position) == position + 1
    assert drafted_position(position, 0) == sampled_position(position) + 1
    assert drafted_position(position, head) == drafted_position(position, 0) + head


def test_gradients_reach_both_layers() -> None:
    heads = random_heads(heads_config())
    heads(rows(), rows(1)).square().sum().backward()
    for name, parameter in heads.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name
