"""A target's embedding and LM head, read from its files without loading the rest of the model.

Every worker of a training needs the two, and none needs the target's layers.

Shape suffixes: V ids of the whole vocabulary, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_bpd.fingerprint import stored_matrix, stores_lm_head


def outline(folder: Path) -> Any | None:
    """The model in `folder` without weights; None if transformers cannot tell what it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError):
        return None


def read_stored(model: Any, folder: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """(embedding, LM head) [V, D] of the model whose `outline` this is, in `dtype`.

    None if either is not stored under the name that the model has for it, as a plain matrix: files
    of another layout, or quantised ones, which only loading the model puts right. Tied, both are
    one tensor.
    """
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding_VD = _read(model, embedding, folder, dtype)
    if lm_head.weight is embedding.weight and not stores_lm_head(folder):
        lm_head_VD = embedding_VD
    else:  # one that is stored wins over a tie, as it does in transformers
        lm_head_VD = _read(model, lm_head, folder, dtype)
    if embedding_VD is None or lm_head_VD is None:
        return None
    return embedding_VD, lm_head_VD


def _read(model: Any, module: Any, folder: Path, dtype: torch.dtype) -> Tensor | None:
    """The weight of `module`, a part of `model`; None if it is not stored as it will be used."""
    name = next(name for name, part in model.named_modules() if part is module) + ".weight"
    path = stored_matrix(folder, name, tuple(module.weight.shape))
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            # A copy: a mapped one would need the files for as long as training lasts.
            stored_VD: Tensor = file.get_tensor(name).to(dtype, copy=True)
    except (SafetensorError, OSError):
        return None
    return stored_VD
