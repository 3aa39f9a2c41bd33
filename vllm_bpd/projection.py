"""From head states to draft ids through the target's own vocabulary projection.

Shape suffixes: N rows, D hidden size, V ids scored on this rank, L rows of the local LM head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_bpd.errors import HeadsError
from vllm_bpd.few_rows import MOST_ROWS, RoundedWeight, rounded


class DraftProjection:
    """Top-1 ids of head states, over the whole vocabulary or over a draft vocabulary.

    Without a draft vocabulary it is the engine's own vocabulary-parallel argmax. With one, an
    unquantised LM head lends the listed rows, copied once into a contiguous matrix; a quantised
    one is called through its own method and the listed columns are kept. Ranks exchange one
    (value, id) pair a row, never logits; the lowest id wins ties; padded ids are never scored.
    """

    def __init__(self, target: nn.Module, draft_token_ids_V: Tensor | None) -> None:
        """Bind to `target`'s LM head; `draft_token_ids_V` is ascending int64, or None for all.

        Raises HeadsError if the target shows no LM head.
        """
        self.lm_head = find_lm_head(target)
        self.bias = getattr(self.lm_head, "bias", None)
        self.processor = getattr(target, "logits_processor", None)
        if not isinstance(self.processor, LogitsProcessor):
            self.processor = LogitsProcessor(self.lm_head.org_vocab_size)
        self.draft_ids_V: Tensor | None = None
        if draft_token_ids_V is not None:
            self._take_draft_rows(draft_token_ids_V)

    def _take_draft_rows(self, draft_token_ids_V: Tensor) -> None:
        shard = self.lm_head.shard_indices
        device = self.lm_head.weight.device if hasattr(self.lm_head, "weight") else None
        start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        mine = (draft_token_ids_V >= start) & (draft_token_ids_V < end)
        self.draft_ids_V = draft_token_ids_V[mine].to(device)
        self.local_rows_V = self.draft_ids_V - start
        self.weight_VD: Tensor | None = None
        self.rounded: RoundedWeight | None = None
        # Either kind of unquantised method has a plain weight (an LM head that a quantised
        # target leaves alone gets the linear one).
        plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
        # On a CPU the linear one packs the weight and leaves nothing of it.
        if isinstance(self.lm_head.quant_method, plain) and self.lm_head.weight.ndim == 2:
            self.weight_VD = self.lm_head.weight.data[self.local_rows_V].contiguous()
            if self.bias is not None:
                self.bias = self.bias.data[self.local_rows_V].contiguous()
            else:
                self.rounded = rounded(self.weight_VD)

    def top_tokens(self, states_ND: Tensor) -> Tensor:
        """The best id of each row, int64 [N], the same on every rank."""
        if self.draft_ids_V is None:
            assert self.processor is not None
            ids_N: Tensor = self.processor.get_top_tokens(self.lm_head, states_ND, self.bias)
            return ids_N
        if self.draft_ids_V.numel() == 0:  # this rank's shard lists none, but takes part
            best_N = states_ND.new_full((states_ND.shape[0],), -float("inf"))
            ids_N = torch.zeros_like(best_N, dtype=torch.int64)
        else:
            best_N, column_N = self._draft_logits(states_ND).max(dim=-1)
            ids_N = self.draft_ids_V[column_N]
        if self.lm_head.tp_size == 1:
            return ids_N
        return reduce_top(best_N, ids_N, self.lm_head.tp_size)

    def top_candidates(self, states_ND: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` best ids of each row, int64 [N, M], and their log probabilities, float32.

        Best first; the same on every rank. Probabilities are over the scored ids. Where there are
        fewer ids, id -1 of probability 0 fills up.
        """
        logits_NV, ids_V = self._local_logits(states_ND)
        found = min(count, logits_NV.shape[1])
        best_NM, column_NM = logits_NV.topk(found, dim=-1)
        ids_NM = ids_V[column_NM]
        if found < count:
            best_NM = nn.functional.pad(best_NM, (0, count - found), value=-float("inf"))
            ids_NM = nn.functional.pad(ids_NM, (0, count - found), value=-1)
        total_N = logits_NV.logsumexp(-1)  # -inf for a rank that scores no id
        if self.lm_head.tp_size > 1:
            best_NM, ids_NM, total_N = reduce_candidates(
                best_NM, ids_NM, total_N, self.lm_head.tp_size
            )
        return ids_NM, best_NM - total_N.unsqueeze(-1)

    def _local_logits(self, states_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of this rank's ids, float32 [N, V], and the ids, int64 [V]; padding left out."""
        if self.draft_ids_V is not None:
            return self._draft_logits(states_ND).float(), self.draft_ids_V
        shard = self.lm_head.shard_indices
        start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        logits_NL = self.lm_head.quant_method.apply(self.lm_head, states_ND, bias=self.bias)
        ids_V = torch.arange(start, end, device=states_ND.device)
        return logits_NL[:, : end - start].float(), ids_V

    def _draft_logits(self, states_ND: Tensor) -> Tensor:
        """Scores of this rank's draft ids, [N, V]; scale and soft cap keep the order, so none."""
        if self.rounded is not None and len(states_ND) <= MOST_ROWS:
            return self.rounded.product(states_ND)
        if self.weight_VD is not None:
            return nn.functional.linear(states_ND, self.weight_VD, self.bias)
        logits_NL: Tensor = self.lm_head.quant_method.apply(self.lm_head, states_ND, bias=self.bias)
        return logits_NL[:, self.local_rows_V]


def reduce_top(best_N: Tensor, ids_N: Tensor, tp_size: int) -> Tensor:
    """The id of the highest value over all ranks, int64 [N]; the lowest id where values tie.

    Ranks hold ascending ranges of ids and `argmax` takes the first maximum, so the lowest rank,
    hence the lowest id, wins. Ids travel as float32, exact up to 2**24.
    """
    pairs_N2 = torch.stack([best_N.float(), ids_N.float()], dim=-1)
    gathered = tensor_model_parallel_all_gather(pairs_N2, dim=-1).view(-1, tp_size, 2)
    winner = gathered[:, :, 0].argmax(dim=-1, keepdim=True)
    return gathered[:, :, 1].gather(-1, winner).squeeze(-1).to(torch.int64)


def reduce_candidates(
    best_NM: Tensor, ids_NM: Tensor, total_N: Tensor, tp_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The M best (value, id) of each row over all ranks, and the log of all their sum.

    Float32 values [N, M], int64 ids [N, M], float32 totals [N] in and out. Equal values: the
    lowest rank, hence the lowest id, first. Ids travel as float32, exact up to 2**24.
    """
    count = best_NM.shape[1]
    packed = torch.cat([best_NM, ids_NM.float(), total_N.unsqueeze(1)], dim=-1)
    ranks = tensor_model_parallel_all_gather(packed, dim=-1).view(-1, tp_size, 2 * count + 1)
    values = ranks[:, :, :count].flatten(1)
    order_NM = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    ids = ranks[:, :, count : 2 * count].flatten(1).gather(-1, order_NM).to(torch.int64)
    return values.gather(-1, order_NM), ids, ranks[:, :, -1].logsumexp(-1)


def find_lm_head(target: nn.Module) -> Any:
    """The target's vocabulary projection: `lm_head`, or the tied embedding in its place.

    Raises HeadsError if there is neither on this rank.
    """
    for owner, name in (
        (target, "lm_head"),
        (getattr(target, "model", None), "embed_tokens"),
    ):
        module = getattr(owner, name, None)
        module = getattr(module, "base_layer", module)  # LoRA wraps it; heads read the base's
        if hasattr(module, "quant_method") and hasattr(module, "shard_indices"):
            return module
    raise HeadsError(
        f"model: {type(target).__name__} shows no lm_head of vLLM's; bpd needs the target's own "
        "vocabulary projection"
    )


def find_embedding(target: nn.Module) -> Callable[[Tensor], Tensor]:
    """The target's embedding of ids [B] as [B, D], up to its scale.

    LoRA wraps the table and adds to it what the running batch's adapters say, in the batch's own
    order; heads are trained on the base's, so they read the table inside.
    """
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    for module in target.modules():
        if isinstance(module, VocabParallelEmbeddingWithLoRA):
            table: Any = module.base_layer
            break
    else:
        table = target.embed_input_ids
    embed: Callable[[Tensor], Tensor] = table
    return embed
