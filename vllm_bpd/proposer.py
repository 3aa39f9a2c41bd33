"""Model runner V1: drafts after bookkeeping, from the target's last hidden states.

Shape suffixes: R sampled rows, B requests that sampled, D hidden size, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_bpd.entry import METHOD

PROPOSER = "vllm_bpd.proposer.BpdProposer"


class BpdProposer:
    """V1's drafter for method `bpd`, built by the engine's `custom_class` branch."""

    def __init__(self, vllm_config: Any) -> None:
        """Keep the config; weights come with `load_model`."""
        self.vllm_config = vllm_config
        self.model: nn.Module | None = None

    def load_model(self, target: nn.Module) -> None:
        """Load the heads and bind them to the loaded `target`."""
        from vllm_bpd.model import load_heads_model

        self.model = load_heads_model(self.vllm_config, target)

    @torch.inference_mode()
    def propose(
        self,
        sampled: list[list[int]],
        sampled_states_RD: Tensor,
        num_draft_tokens: Sequence[int] | None,
        num_drafts: int,
    ) -> list[list[int]]:
        """Drafts for each request; none for one that sampled nothing (a prefill chunk).

        `sampled` holds the ids each request has just accepted and sampled; `num_draft_tokens`
        how many drafts each had under verification (None: none had any).
        """
        assert self.model is not None, "load_model() comes first"
        drafts: list[list[int]] = [[] for _ in sampled]
        rows = last_accepted_rows(sampled, num_draft_tokens)
        if not rows or num_drafts == 0:
            return drafts
        device = sampled_states_RD.device
        hidden_BD = sampled_states_RD[torch.tensor(list(rows.values()), device=device)]
        last_B = torch.tensor([sampled[i][-1] for i in rows], device=device)
        ids_BK = self.model(hidden_BD, last_B)[:, :num_drafts]
        for i, ids in zip(rows, ids_BK.tolist(), strict=True):
            drafts[i] = ids
        return drafts


def last_accepted_rows(
    sampled: list[list[int]], num_draft_tokens: Sequence[int] | None
) -> dict[int, int]:
    """Request index -> row of its last accepted position, for requests that sampled.

    A request under verification owns `drafts + 1` consecutive rows; row j scores the token behind
    its j-th draft, so the last of n sampled tokens came from row n - 1.
    """
    rows, offset = {}, 0
    for i, tokens in enumerate(sampled):
        if tokens:
            rows[i] = offset + len(tokens) - 1
        offset += 1 + (num_draft_tokens[i] if num_draft_tokens is not None else 0)
    return rows


def init_runner(original: Callable[..., None], runner: Any, vllm_config: Any, device: Any) -> None:
    """Let the runner's closed if/elif build `BpdProposer` through its `custom_class` branch."""
    speculative = vllm_config.speculative_config
    if getattr(speculative, "method", None) != METHOD:
        original(runner, vllm_config, device)
        return
    heads = speculative.model
    speculative.method, speculative.model = "custom_class", PROPOSER
    try:
        original(runner, vllm_config, device)
    finally:
        speculative.method, speculative.model = METHOD, heads


def propose_draft_token_ids(
    original: Callable[..., Any],
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Tensor,
    sample_hidden_states: Tensor,
    aux_hidden_states: Any,
    spec_decode_metadata: Any,
    common_attn_metadata: Any,
    slot_mappings: Any,
) -> Any:
    """Draft with the heads for method `bpd`; pass everything on for the others."""
    if not isinstance(getattr(runner, "drafter", None), BpdProposer):
        return original(
            runner,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            slot_mappings,
        )
    num_draft_tokens = None
    if spec_decode_metadata is not None:
        num_draft_tokens = spec_decode_metadata.num_draft_tokens
    runner._draft_probs = None
    runner._draft_prob_req_ids = None
    return runner.drafter.propose(
        sampled_token_ids,
        sample_hidden_states,
        num_draft_tokens,
        scheduler_output.num_spec_tokens_to_schedule,
    )
