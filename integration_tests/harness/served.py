"""Heads out of a running engine, as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_served(runner: Any, folder: Path) -> None:
    """Write the heads that `runner` drafts with to `folder`, in the dtype they were stored in.

    Takes an engine of one rank that drafts with all heads. vLLM packs weights on a CPU and keeps
    no plain ones, so each layer is asked for its own: the rows of the identity come out as the
    columns of its weight, exactly, since all other products are zero.
    """
    import torch

    from vllm_bpd.checkpoint import save_heads
    from vllm_bpd.heads import BlockwiseHeads

    drafter = getattr(runner, "drafter", None) or runner.speculator
    served = drafter.model
    heads = BlockwiseHeads(served.config)
    with torch.inference_mode():
        for name in ("hidden_layer", "output_layer"):
            weight = getattr(heads, name).weight
            weight.copy_(getattr(served.heads, name)(torch.eye(weight.shape[1])).T)
    save_heads(
        folder,
        heads,
        served.draft_token_ids_V,
        dtype=torch.bfloat16,
        lattice_weights_PW=served.lattice_weights_PF,
    )
