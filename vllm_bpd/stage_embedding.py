"""The target's embedding on a pipeline stage that has none: the first stage's, read once more.

Heads conditioned on the sampled token read its embedding. They live on the last stage, which has
the table only where it is tied to the LM head.

Shape suffixes: B ids, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_bpd.discovery import weights_folder
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import stored_embedding


def is_missing(embed: Callable[[Tensor], Tensor], device: torch.device) -> bool:
    """Whether this stage's embedding is the engine's placeholder, which returns the ids."""
    return not embed(torch.zeros(1, dtype=torch.int64, device=device)).is_floating_point()


def load_embedding(vllm_config: VllmConfig) -> Any:
    """The target's embedding of ids [B] as [B, D], this rank's shard of it, from the checkpoint.

    Raises HeadsError if it is not stored as a plain matrix in safetensors on this machine.
    """
    target = vllm_config.model_config
    rows, width = target.get_vocab_size(), target.get_hidden_size()
    with torch.device(vllm_config.device_config.device):
        table: Any = VocabParallelEmbedding(rows, width, params_dtype=target.dtype)
    if vllm_config.load_config.load_format == "dummy":
        return table
    folder = weights_folder(target.model, target.revision, vllm_config.load_config.download_dir)
    stored = None if folder is None else stored_embedding(folder, rows, width)
    if stored is None:
        raise HeadsError(
            f"pipeline_parallel_size: these heads read the sampled token's embedding on the last "
            f"stage, and {folder or target.model} has no plain one in safetensors; serve it with "
            "tensor parallelism alone, or with heads whose conditioning is none"
        )
    path, name = stored
    with safe_open(path, framework="pt") as file:
        table.weight_loader(table.weight, file.get_slice(name)[:rows])
    return table
