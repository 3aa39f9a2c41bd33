"""The modules under training: a batch in, its loss out.

`FrozenObjective` has the heads alone, on cached states; `TunedObjective` the target too, whose
states it makes. In training mode both return the loss; otherwise the tuned one returns what
the walk needs.

Shape suffixes: R rows of a batch, B answers, L their longest, K heads, V scored ids, W whole
vocabulary, S labels a row, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads_training.batches import P1
from heads_training.losses import chunked_loss
from vllm_bpd.heads import BlockwiseHeads

Targets = dict[int, tuple[Tensor, Tensor]]  # by head: ids [R, S] and weights [R, S]


class FrozenObjective(nn.Module):
    """Heads on cached states; embedding and LM head stay as the target has them."""

    accepts_loss_kwargs = False  # the batch's weights already say how the loss is scaled

    def __init__(
        self, heads: BlockwiseHeads, embedding_WD: Tensor, head_VD: Tensor, chunk: int
    ) -> None:
        """`embedding_WD` and `head_VD` are in the dtype of the products."""
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.embedding_WD: Tensor
        self.head_VD: Tensor
        self.register_buffer("embedding_WD", embedding_WD, persistent=False)
        self.register_buffer("head_VD", head_VD, persistent=False)
        # They never change: DDP would send them to every process in every step.
        self._ddp_params_and_buffers_to_ignore = ["embedding_WD", "head_VD"]

    def forward(self, hidden_RD: Tensor, sampled_R: Tensor, targets: Targets) -> dict[str, Tensor]:
        """The loss, float32: the sum of every head's weighted cross-entropy.

        `targets` of a head may be for the first rows only.
        """
        conditioned = self.heads.config.conditioning == "sampled_token"
        embedding_RD = self.embedding_WD[sampled_R] if conditioned else None
        states_RKD = self.heads(hidden_RD.to(self.head_VD.dtype), embedding_RD)
        losses = [
            chunked_loss(
                (states_RKD[: len(ids_RS), head], ids_RS, weights_RS), (self.head_VD,), self.chunk
            )
            for head, (ids_RS, weights_RS) in targets.items()
        ]
        return {"loss": torch.stack(losses).sum()}


class TunedObjective(nn.Module):
    """The target and its heads together: the paper's fine-tuning."""

    accepts_loss_kwargs = False

    def __init__(
        self, base: Any, heads: BlockwiseHeads, draft_ids_V: Tensor | None, chunk: int
    ) -> None:
        """`base` is a transformers causal LM whose LM head reads its last hidden state."""
        super().__init__()
        self.base, self.heads, self.chunk = base, heads, chunk
        self.draft_ids_V: Tensor | None
        self.register_buffer("draft_ids_V", draft_ids_V, persistent=False)

    def forward(
        self,
        ids_BL: Tensor,
        positions_BL: Tensor,
        places_R: Tensor,
        sampled_R: Tensor,
        targets: Targets | None = None,
    ) -> dict[str, Tensor]:
        """The loss in training; without targets, the drafts [R, K] and p1's choice [R].

        `positions_BL` begin at 0 again with each text of a packed row, which no text looks beyond;
        `places_R` are the rows' places in the flattened batch.
        """
        output = self.base.base_model(input_ids=ids_BL, position_ids=positions_BL, use_cache=False)
        hidden_RD = output.last_hidden_state.flatten(0, 1)[places_R]
        conditioned = self.heads.config.conditioning == "sampled_token"
        embedding_RD = self.base.get_input_embeddings().weight[sampled_R] if conditioned else None
        states_RKD = self.heads(hidden_RD, embedding_RD)
        lm_head_WD = self._cast(self.base.get_output_embeddings().weight)
        head_VD = lm_head_WD if self.draft_ids_V is None else lm_head_WD[self.draft_ids_V]
        if targets is None:
            return self._choices(hidden_RD, states_RKD, lm_head_WD, head_VD)
        losses = [
            chunked_loss((hidden_RD, ids_RS, weights_RS), (lm_head_WD,), self.chunk)
            if head == P1
            else chunked_loss((states_RKD[:, head], ids_RS, weights_RS), (head_VD,), self.chunk)
            for head, (ids_RS, weights_RS) in targets.items()
        ]
        return {"loss": torch.stack(losses).sum()}

    def _choices(
        self, hidden_RD: Tensor, states_RKD: Tensor, lm_head_WD: Tensor, head_VD: Tensor
    ) -> dict[str, Tensor]:
        def best(states_RD: Tensor, matrix_VD: Tensor) -> Tensor:
            parts = states_RD.to(matrix_VD.dtype).split(self.chunk)
            return torch.cat([(part_RD @ matrix_VD.T).argmax(-1) for part_RD in parts])

        drafts = [best(states_RKD[:, i], head_VD) for i in range(self.heads.num_heads)]
        drafts_RK = torch.stack(drafts, 1)
        if self.draft_ids_V is not None:
            drafts_RK = self.draft_ids_V[drafts_RK]
        return {"drafts_RK": drafts_RK, "chosen_R": best(hidden_RD, lm_head_WD)}

    @staticmethod
    def _cast(weight_WD: Tensor) -> Tensor:
        """Once for all chunks; autocast would do it for each."""
        kind = weight_WD.device.type
        return (
            weight_WD.to(torch.get_autocast_dtype(kind))
            if torch.is_autocast_enabled(kind)
            else weight_WD
        )
