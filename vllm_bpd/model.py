"""The heads as a vLLM model: loaded by vLLM's own loader, sharded as its own layers are.

Shape suffixes: B rows, D hidden size, K heads, N = B * K, V scored ids, M candidates of a head,
P places of the block, F weights of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_bpd.checkpoint import (
    DRAFT_TOKEN_IDS,
    LATTICE_WEIGHTS,
    OUTPUT_WEIGHT,
    check_draft_token_ids,
    check_lattice_weights,
)
from vllm_bpd.config import HeadsConfig
from vllm_bpd.discovery import check_weights_on_disk, weights_folder
from vllm_bpd.errors import HeadsError
from vllm_bpd.few_rows import FewRowsRounded, rounded
from vllm_bpd.heads import BlockwiseHeads
from vllm_bpd.lattice import CANDIDATES, NUM_WEIGHTS
from vllm_bpd.projection import DraftProjection, find_embedding
from vllm_bpd.stage_embedding import is_missing, load_embedding


class BlockwiseHeadsModel(nn.Module):
    """k - 1 blockwise heads beside a target, on one tensor-parallel rank.

    The joint hidden layer is split by columns and the output layer by rows, so each rank holds
    1/tp of the weights and one all-reduce joins them. Where tp does not divide the joint hidden
    size, both are replicated and nothing is reduced. No layer is quantised, but on a CPU one rank
    keeps its weights in int8 besides, for few rows (few_rows.py).
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the heads that `vllm_config.speculative_config` names; weights come later."""
        super().__init__()
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.config: HeadsConfig = speculative.draft_model_config.hf_config.heads
        self.num_ranks = get_tensor_model_parallel_world_size()
        shards = self.config.joint_hidden_size % self.num_ranks == 0
        self.heads = BlockwiseHeads(
            self.config,
            make_hidden=lambda size, out: _hidden_layer(size, out, shards, prefix),
            make_output=lambda size, out: _output_layer(size, out, shards, prefix),
            num_heads=min(speculative.num_speculative_tokens, self.config.num_draft_heads),
        )
        self.places: int = speculative.num_speculative_tokens
        self.lattice_weights_PF: Tensor | None = None  # float32, on the host
        self.draft_token_ids_V: Tensor | None = None
        self.projection: DraftProjection | None = None
        self.embed: Callable[[Tensor], Tensor] | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the checkpoint's tensors strictly; returns the parameter names loaded.

        Raises HeadsError for a tensor that is missing, unused or of another shape.
        """
        wanted = dict(self.heads.named_parameters())
        loaded: set[str] = set()
        for name, tensor in weights:
            if name == DRAFT_TOKEN_IDS and self.config.draft_vocab_size is not None:
                check_draft_token_ids(tensor, self.config)
                self.draft_token_ids_V = tensor.long()
                continue
            if name == LATTICE_WEIGHTS and self.config.lattice_places is not None:
                check_lattice_weights(tensor, self.config)
                self.lattice_weights_PF = tensor.float().cpu()[: self.places]
                continue
            parameter = wanted.get(name)
            if parameter is None:
                raise HeadsError(f"{name}: unused tensor; expected {', '.join(wanted)}")
            if name == OUTPUT_WEIGHT:  # fewer drafts than heads: the first heads' rows
                tensor = tensor[: self.heads.num_heads * self.config.hidden_size]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        missing = sorted(wanted.keys() - loaded)
        if self.config.draft_vocab_size is not None and self.draft_token_ids_V is None:
            missing.append(DRAFT_TOKEN_IDS)
        if self.config.lattice_places is not None and self.lattice_weights_PF is None:
            missing.append(LATTICE_WEIGHTS)
        if missing:
            raise HeadsError(f"{', '.join(missing)}: missing from the heads' weights")
        self._round_weights()
        return {f"heads.{name}" for name in loaded}

    def _round_weights(self) -> None:
        """Now, since on a CPU the engine may pack a weight next, and leave nothing of it."""
        if self.num_ranks > 1:
            return  # ranks add up parts of one product: they have to take the same one
        for name in ("hidden_layer", "output_layer"):
            layer = getattr(self.heads, name)
            weight = rounded(layer.weight.data)
            if weight is not None:
                setattr(self.heads, name, FewRowsRounded(layer, weight))

    def take_dummy_lattice(self) -> None:
        """Zeros for lattice weights: `load_weights` is not called where weights are dummies."""
        if self.config.lattice_places is not None:
            self.lattice_weights_PF = torch.zeros(self.places, NUM_WEIGHTS)

    def bind(self, target: nn.Module) -> None:
        """Share the target's vocabulary projection and, if conditioned on it, its embedding."""
        self.projection = DraftProjection(target, self.draft_token_ids_V)
        if self.config.conditioning == "sampled_token":
            self.embed = find_embedding(target)

    def forward(self, hidden_BD: Tensor, sampled_B: Tensor) -> Tensor:
        """Draft token ids, int64 [B, K], from last hidden states [B, D] and ids just sampled [B].

        One batched pass: two matrix products for all heads, one with the vocabulary. Every rank
        of a tensor-parallel group must call it with the same B, at least 1.
        """
        assert self.projection is not None, "bind() comes first"
        states_BKD = self._head_states(hidden_BD, sampled_B)
        ids_N: Tensor = self.projection.top_tokens(states_BKD.flatten(0, 1))
        return ids_N.view(-1, self.heads.num_heads)

    def candidates(self, hidden_BD: Tensor, sampled_B: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's most probable ids, int64 [B, K, M], and their log probabilities, float32.

        Takes what `forward` takes, at the cost of `forward` and a selection.
        """
        assert self.projection is not None, "bind() comes first"
        states_BKD = self._head_states(hidden_BD, sampled_B)
        ids_NM, logp_NM = self.projection.top_candidates(states_BKD.flatten(0, 1), CANDIDATES)
        shape = (-1, self.heads.num_heads, ids_NM.shape[1])
        return ids_NM.view(shape), logp_NM.view(shape)

    def _head_states(self, hidden_BD: Tensor, sampled_B: Tensor) -> Tensor:
        embedding_BD = None
        if self.embed is not None:
            embedding_BD = self.embed(sampled_B)
        states_BKD: Tensor = self.heads(hidden_BD, embedding_BD)
        return states_BKD


@torch.inference_mode()
def load_heads_model(vllm_config: VllmConfig, target: nn.Module) -> BlockwiseHeadsModel:
    """The heads that `vllm_config` names, through vLLM's loader, bound to `target`.

    Raises HeadsError if this machine has others than the front end found, or none, or if they were
    trained for another target than the one loaded.
    """
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.model_loader import get_model

    speculative = vllm_config.speculative_config
    assert speculative is not None
    load_config = speculative.draft_load_config
    if load_config is None:
        # A target may be stored in any format; heads are safetensors, or dummies beside dummies.
        target_load = vllm_config.load_config
        chosen = "dummy" if target_load.load_format == "dummy" else "safetensors"
        load_config = type(target_load)(load_format=chosen)
    elif load_config.load_format == "auto":  # it would go on to pickles
        load_config = replace(load_config, load_format="safetensors")
    if load_config.load_format != "dummy":
        folder = speculative.provenance.here(vllm_config.model_config.hf_token)
        speculative.draft_model_config.model = str(folder)
        _check_loaded_target(vllm_config, folder)
    with set_model_tag("bpd_heads"):
        model = get_model(
            vllm_config=vllm_config,
            model_config=speculative.draft_model_config,
            load_config=load_config,
        )
    assert isinstance(model, BlockwiseHeadsModel)
    if load_config.load_format == "dummy":
        model.take_dummy_lattice()
    model.bind(target)
    if model.embed is not None and is_missing(model.embed, vllm_config.device_config.device):
        model.embed = load_embedding(vllm_config)
    return model


def _check_loaded_target(vllm_config: VllmConfig, folder: Path) -> None:
    """Compare the LM head that the heads in `folder` belong to with the one just loaded.

    By the files it was loaded from: in memory it may be split, cast, quantised or packed.
    """
    target, load_config = vllm_config.model_config, vllm_config.load_config
    if load_config.load_format != "dummy":
        check_weights_on_disk(
            folder,
            vllm_config.speculative_config.draft_model_config.hf_config.heads,
            weights_folder(target.model, target.revision, load_config.download_dir),
            getattr(target.hf_text_config, "tie_word_embeddings", None),
        )


def _hidden_layer(size: int, out: int, shards: bool, prefix: str) -> nn.Module:
    name = f"{prefix}heads.hidden_layer"
    if not shards:
        return ReplicatedLinear(size, out, bias=False, return_bias=False, prefix=name)
    return ColumnParallelLinear(
        size, out, bias=False, gather_output=False, return_bias=False, prefix=name
    )


def _output_layer(size: int, out: int, shards: bool, prefix: str) -> nn.Module:
    name = f"{prefix}heads.output_layer"
    if not shards:
        return ReplicatedLinear(size, out, bias=False, return_bias=False, prefix=name)
    return RowParallelLinear(size, out, bias=False, return_bias=False, prefix=name)
