"""Model runner V2: drafts on the device, with no wait for it, in a CUDA graph where there is one.

Written after how the engine's parallel drafters do it (vllm/v1/worker/gpu/spec_decode/dflash).

Shape suffixes: B requests (padded to the graph's size when replayed), T target tokens, D hidden
size, K drafts, L columns of the engine's token table, W columns of them searched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_bpd.entry import METHOD
from vllm_bpd.lattice import draft_block
from vllm_bpd.model import BlockwiseHeadsModel, load_heads_model

logger = logging.getLogger(__name__)


class BpdSpeculator(DraftModelSpeculator):
    """V2's speculator for method `bpd`: one parallel pass over each request's last accepted row."""

    model: BlockwiseHeadsModel

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any = None) -> None:
        """Reserve the buffers that a captured graph reads and writes.

        `req_states` is the runner's: what each request says, and how long it is. None before vLLM
        0.32, until `init_runner` sets it.
        """
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.slots_B = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self.lattice_weights_PF: Tensor | None = None
        speculative = vllm_config.speculative_config
        for name in ("min_confidence_per_batch_size", "heads_up_to_batch_size"):
            if getattr(speculative, name) is not None:
                logger.warning(
                    "%s: has no effect on model runner V2, which verifies a fixed number of "
                    "drafts a step; use num_speculative_tokens_per_batch_size there",
                    name,
                )
        longest = min(speculative.context_window, vllm_config.model_config.max_model_len)
        self.window_W = torch.arange(-longest, 0, device=device)
        self.hidden_BD = torch.zeros(
            self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device
        )
        self.sampled_B = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self.graphs: CudaGraphManager | None = None

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the heads and bind them to the target."""
        model = load_heads_model(self.vllm_config, target_model)
        if model.lattice_weights_PF is not None:
            self.lattice_weights_PF = model.lattice_weights_PF.to(self.device)
        return model

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Heads have no attention and no KV cache: nothing to set up."""

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepare graphs for the decode sizes where the engine captures full decode graphs."""
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        full = full and not self.speculative_config.enforce_eager
        self.graphs = CudaGraphManager(
            self.vllm_config,
            self.device,
            CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
            decode_query_len=1,  # drafting reads one row a request
        )

    def capture(self) -> None:
        """Record one drafting graph for each captured batch size."""
        assert self.graphs is not None
        self.hidden_BD.zero_()
        self.sampled_B.zero_()
        self.slots_B.zero_()

        def create_forward_fn(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            num_reqs = desc.num_reqs or desc.num_tokens
            return lambda mode: self._draft(num_reqs)

        self.graphs.capture(create_forward_fn, progress_bar_desc="Capturing bpd CUDA graphs")

    def _draft(self, num_reqs: int) -> None:
        """Fill the first `num_reqs` rows of `draft_tokens` from the same rows of the buffers."""
        hidden_BD, sampled_B = self.hidden_BD[:num_reqs], self.sampled_B[:num_reqs]
        if self.lattice_weights_PF is None:
            self.draft_tokens[:num_reqs] = self.model(hidden_BD, sampled_B)
            return
        ids_BKM, logp_BKM = self.model.candidates(hidden_BD, sampled_B)
        window_BW = self._windows(self.slots_B[:num_reqs])
        block = draft_block(window_BW, ids_BKM, logp_BKM, self.lattice_weights_PF)
        self.draft_tokens[:num_reqs] = block.ids_BP

    def _windows(self, slots_B: Tensor) -> Tensor:
        """The last tokens of each request, int32 [B, W], newest last, -1 before its first."""
        if not self.speculative_config.context_lookup:
            return torch.full((len(slots_B), 2), -1, dtype=torch.int32, device=self.device)
        lengths_B = self.req_states.total_len.gpu[slots_B]
        columns_BW = lengths_B.unsqueeze(1) + self.window_W
        tokens_BW = self.req_states.all_token_ids.gpu[slots_B.unsqueeze(1), columns_BW.clamp(min=0)]
        return torch.where(columns_BW >= 0, tokens_BW, -1)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        dp_sync: Any = None,  # what dp_sync_state is called before 0.32
    ) -> Tensor:
        """Draft ids, int64 [B, K], from the target's last hidden states [T, D].

        Rows of requests that sampled nothing (a prefill chunk) are computed and mean nothing; the
        runner ignores them. Shapes never depend on values on the device, so nothing waits for it.
        """
        num_reqs = input_batch.num_reqs
        if num_speculative_tokens == 0:  # a dynamic schedule has switched speculation off
            return self.draft_tokens[:num_reqs]
        ends_B = input_batch.query_start_loc[1 : num_reqs + 1].long()
        rows_B = (ends_B - 1 - num_rejected[:num_reqs]).clamp_(min=0)
        torch.index_select(last_hidden_states, 0, rows_B, out=self.hidden_BD[:num_reqs])
        self.slots_B[:num_reqs] = input_batch.idx_mapping[:num_reqs]
        sampled_B = last_sampled.view(-1)[self.slots_B[:num_reqs]]
        # A slot that never sampled may hold any value; the embedding needs an id.
        self.sampled_B[:num_reqs] = sampled_B.clamp(0, self.vocab_size - 1)
        graph = None if is_profile else self._graph_for(num_reqs)
        if graph is None:
            self._draft(num_reqs)
        else:
            assert self.graphs is not None
            self.graphs.run_fullgraph(graph)
        return self.draft_tokens[:num_reqs]

    def _graph_for(self, num_reqs: int) -> BatchExecutionDescriptor | None:
        """The captured graph that serves `num_reqs` requests, or None: eager."""
        if self.graphs is None:  # profiling comes before the graphs
            return None
        desc = self.graphs.dispatch(num_reqs, num_reqs, uniform_token_count=1, num_active_loras=0)
        return desc if desc.cg_mode == CUDAGraphMode.FULL else None


def init_speculator(
    original: Callable[..., Any], vllm_config: Any, device: torch.device, *req_states: Any
) -> Any:
    """Build our speculator for method `bpd`; pass on for the others.

    Before 0.32 there are no `req_states` yet: `init_runner` hands them over.
    """
    if vllm_config.speculative_config.method == METHOD:
        return BpdSpeculator(vllm_config, device, *req_states)
    return original(vllm_config, device, *req_states)


def init_runner(original: Callable[..., None], runner: Any, vllm_config: Any, device: Any) -> None:
    """Hand the requests' texts to our speculator, which the runner makes before them."""
    original(runner, vllm_config, device)
    if isinstance(runner.speculator, BpdSpeculator):
        runner.speculator.req_states = runner.req_states
