"""Random heads for the tiny targets, written through the plugin's own public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEAD_HIDDEN = 24


def write_heads(
    target: Path, directory: Path, num_heads: int, places: int | None = None, **config: Any
) -> Path:
    """Write random heads for the target checkpoint `target`; `config` are further config fields.

    With `draft_vocab_size`, the ids scored are every other one from 1 on. With `places`, they have
    a lattice of that many places, whose weights trust longer matches more.
    """
    import torch

    from vllm_bpd.checkpoint import save_heads
    from vllm_bpd.config import HeadsConfig
    from vllm_bpd.fingerprint import read_fingerprint
    from vllm_bpd.heads import BlockwiseHeads

    fingerprint = read_fingerprint(target)
    torch.manual_seed(num_heads)
    made = HeadsConfig(num_heads, HEAD_HIDDEN, fingerprint, **config)
    ids = None
    if made.draft_vocab_size is not None:
        ids = torch.arange(made.draft_vocab_size) * 2 + 1
    lattice = None
    if places is not None:
        from heads_training.lattice_fit import initial_weights

        lattice = initial_weights().repeat(places, 1)
    heads = BlockwiseHeads(made)
    save_heads(directory, heads, ids, dtype=torch.float32, lattice_weights_PW=lattice)
    return directory
