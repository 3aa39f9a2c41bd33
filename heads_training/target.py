"""The frozen target as training needs it: its folder, its model, its embedding and LM head.

Shape suffixes: B texts, L tokens, V ids of the whole vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_bpd.config import TargetFingerprint
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import read_fingerprint

_CHECKED_IDS = 16  # tokens of the text that the last hidden state is checked on


@dataclass(frozen=True)
class TargetRows:
    """The parts of a target that heads read, frozen."""

    fingerprint: TargetFingerprint  # goes into the heads' config
    embedding_VD: Tensor  # input embedding, one row an id, the checkpoint's dtype
    lm_head_VD: Tensor  # vocabulary projection, one row an id, the checkpoint's dtype


def resolve_target(target: str) -> Path:
    """The target's folder: `target` itself, or the local copy of a hub id.

    Raises HeadsError if it is neither, or holds no model.
    """
    if Path(target).is_dir():
        if not (Path(target) / "config.json").is_file():
            raise HeadsError(
                f"target: {target}: found a folder without config.json; expected a model's folder"
            )
        return Path(target)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadsError(
            f"target: found {target!r}; expected a model folder or the id of a model that can be "
            f"downloaded ({reason})"
        ) from None


def load_model(target: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The target as a transformers causal LM on the CPU, for inference.

    Raises HeadsError if transformers cannot load it, or if its base model's last hidden state is
    not what its LM head reads (heads trained on another would draft noise).
    """
    from transformers import AutoModelForCausalLM

    folder = resolve_target(target)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError) as error:
        raise HeadsError(
            f"target: {folder}: transformers cannot load it ({str(error).splitlines()[0]})"
        ) from None
    model.eval().requires_grad_(False)
    check_last_hidden_state(model)
    return model


def last_hidden_state(model: Any, ids_BL: Tensor) -> Tensor:
    """[B, L, D] behind the final norm, in the model's dtype; never any logits.

    No attention mask: texts shorter than L are padded at their end, and causal attention never
    looks there. So the caller must leave the padded positions unread.
    """
    with torch.inference_mode():
        hidden_BLD: Tensor = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    return hidden_BLD


def check_last_hidden_state(model: Any) -> None:
    """Refuse a model whose LM head, on `last_hidden_state`, does not rank as its logits do."""
    lm_head = model.get_output_embeddings()
    if lm_head is None or getattr(lm_head, "bias", None) is not None:
        found = "none" if lm_head is None else "one with a bias"
        raise HeadsError(
            f"target: LM head: found {found}; expected a plain projection without a bias"
        )
    count = min(_CHECKED_IDS, int(model.config.get_text_config().vocab_size))
    ids_BL = torch.arange(count).unsqueeze(0)
    with torch.inference_mode():
        logits_LV = model(input_ids=ids_BL).logits[0]
        own_LV = lm_head(last_hidden_state(model, ids_BL)[0])
    if not torch.equal(logits_LV.argmax(-1), own_LV.argmax(-1)):
        raise HeadsError(
            f"target: {type(model).__name__}: its base model's last hidden state is not what its "
            "LM head reads; expected an architecture whose final norm belongs to the base model"
        )


def read_rows(target: str) -> TargetRows:
    """Embedding and LM head of the target, and its fingerprint. Errors as `load_model`."""
    model = load_model(target)
    return TargetRows(
        fingerprint=read_fingerprint(resolve_target(target)),
        embedding_VD=model.get_input_embeddings().weight.detach().clone(),
        lm_head_VD=model.get_output_embeddings().weight.detach().clone(),
    )
