"""The blockwise heads, defined once, in plain torch, for training and serving alike.

Stern et al. 2018 (arXiv 1811.03115), section 4: on the target's last hidden state sits one joint
hidden layer; each head's slice of the output layer is added to that hidden state; the target's
own vocabulary projection scores every head.

Shape suffixes: B rows (requests or positions), D the target's hidden size, E input size (D, or 2D
with the sampled token), F joint hidden size, K heads, V scored ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm_bpd.config import HeadsConfig

# The hidden state at position t is what the target samples token t+1 from. Head i (i = 0 is the
# first extra head) drafts the token behind that: position t + 2 + i. Training labels and served
# drafts both come from `drafted_position`, so the two cannot drift apart.
_FIRST_DRAFTED_OFFSET = 2

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
}


def drafted_position(position: int, head: int) -> int:
    """Index of the token that `head` (0-based) drafts from the hidden state at `position`."""
    return position + _FIRST_DRAFTED_OFFSET + head


def sampled_position(position: int) -> int:
    """Index of the token that the target itself samples from the hidden state at `position`."""
    return position + _FIRST_DRAFTED_OFFSET - 1


def linear(in_features: int, out_features: int) -> nn.Module:
    """The plain layer of training; serving passes the engine's sharded ones instead."""
    return nn.Linear(in_features, out_features, bias=False)


class BlockwiseHeads(nn.Module):
    """k - 1 heads that draft a whole block from one hidden state, in one pass.

    Parameters: `hidden_layer.weight` [F, E] and `output_layer.weight` [K * D, F], no biases.
    """

    def __init__(
        self,
        config: HeadsConfig,
        make_hidden: Callable[[int, int], nn.Module] = linear,
        make_output: Callable[[int, int], nn.Module] = linear,
        num_heads: int | None = None,
    ) -> None:
        """Build from `make_hidden(E, F)` and `make_output(F, num_heads * D)`.

        `num_heads` below `config.num_draft_heads` keeps only the first heads: the joint hidden
        layer stays whole, since each head reads all of it.
        """
        super().__init__()
        self.config = config
        self.num_heads = num_heads or config.num_draft_heads
        self.hidden_layer = make_hidden(config.input_size, config.joint_hidden_size)
        self.output_layer = make_output(
            config.joint_hidden_size, self.num_heads * config.hidden_size
        )
        self.activation = _ACTIVATIONS[config.activation]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Start of training: every head equal to the target's own, which is p1's prediction.

        The output layer is zero, so the residual alone speaks; the hidden layer is Kaiming
        uniform.
        """
        hidden, output = self.hidden_layer.weight, self.output_layer.weight
        assert isinstance(hidden, Tensor)
        assert isinstance(output, Tensor)
        nn.init.kaiming_uniform_(hidden, a=5**0.5, generator=generator)
        nn.init.zeros_(output)

    def forward(self, hidden_BD: Tensor, embedding_BD: Tensor | None = None) -> Tensor:
        """Every head's state, [B, K, D], from hidden states [B, D] of any float dtype.

        `embedding_BD` is the target's embedding of the token just sampled; given exactly when
        the config's conditioning is `sampled_token`.
        """
        if (embedding_BD is not None) != (self.config.conditioning == "sampled_token"):
            raise ValueError(
                f"embedding: found {'one' if embedding_BD is not None else 'none'}; "
                f"conditioning is {self.config.conditioning!r}"
            )
        input_BE = hidden_BD
        if embedding_BD is not None:
            input_BE = torch.cat([hidden_BD, _unit_rms(embedding_BD)], dim=-1)
        joint_BF = self.activation(self.hidden_layer(input_BE))
        output_BKD = self.output_layer(joint_BF).unflatten(-1, (self.num_heads, -1))
        residual: Tensor = output_BKD + hidden_BD.unsqueeze(-2)
        return residual


def _unit_rms(x_BD: Tensor) -> Tensor:
    """Scale rows to root mean square 1.

    Embedding scales differ between targets, and between an engine that applies a target's
    embedding multiplier and a training loop that does not: what heads read must not.
    """
    return nn.functional.rms_norm(x_BD, (x_BD.shape[-1],), eps=1e-6)
