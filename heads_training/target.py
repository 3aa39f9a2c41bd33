"""The frozen target as training needs it: its folder, its model, its embedding and LM head.

Shape suffixes: B texts, L tokens, V ids of the whole vocabulary, D hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads_training.placement import (
    DeviceMap,
    choose_map,
    input_device,
    is_spread,
    one_device,
    report,
)
from heads_training.stored_rows import outline, read_stored
from vllm_bpd.config import TargetFingerprint
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import read_fingerprint

_CHECKED_IDS = 16  # tokens of the text that the last hidden state is checked on
# What a hub model's folder is copied with: config, weights, tokenizer, chat template.
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_SAMPLES = 256  # places in a weight file whose bytes are hashed
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TargetRows:
    """The parts of a target that heads read, frozen."""

    fingerprint: TargetFingerprint  # goes into the heads' config
    embedding_VD: Tensor  # input embedding, one row an id, the checkpoint's dtype
    lm_head_VD: Tensor  # vocabulary projection, one row an id, the checkpoint's dtype
    folder: Path | None = None  # the checkpoint, from which finetuning starts


def resolve_target(target: str, field: str = "target") -> Path:
    """The target's folder: `target` itself, or the local copy of a hub id.

    Raises HeadsError, naming `field`, if it is neither, or holds no model.
    """
    if Path(target).is_dir():
        if not (Path(target) / "config.json").is_file():
            raise HeadsError(
                f"{field}: {target}: found a folder without config.json; expected a model's folder"
            )
        return Path(target)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target, allow_patterns=list(_MODEL_FILES)))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadsError(
            f"{field}: found {target!r}; expected a model folder or the id of a model that can be "
            f"downloaded ({reason})"
        ) from None


def load_causal_lm(
    folder: Path,
    dtype: str | torch.dtype,
    device: str | None = None,
    field: str = "target",
    device_map: DeviceMap | None = None,
) -> Any:
    """The model in `folder` as transformers' causal LM, for inference.

    `device` None is the GPU if there is one, all GPUs here if one is too small, else the CPU;
    `device_map` places the parts by hand. Raises HeadsError, naming `field`, if transformers
    cannot load it.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if device is None and device_map is None:
        device_map = choose_map(folder, dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, device_map=device_map
        )
    except (OSError, ValueError) as error:
        raise HeadsError(
            f"{field}: {folder}: transformers cannot load it ({str(error).splitlines()[0]})"
        ) from None
    # A model's own sampling settings would else be mixed into every generation.
    model.generation_config = GenerationConfig()
    if is_spread(model):
        report(model, folder)
    else:
        model = model.to(device or one_device())
    return model.eval().requires_grad_(False)


def load_model(target: str, dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> Any:
    """`load_causal_lm` of the target, its last hidden state checked.

    Raises HeadsError if transformers cannot load it, or if its base model's last hidden state is
    not what its LM head reads (heads trained on another would draft noise).
    """
    model = load_causal_lm(resolve_target(target), dtype, device)
    check_last_hidden_state(model)
    return model


def weights_digest(folder: Path) -> str:
    """sha256 (hex) over the sizes of the weight files in `folder` and samples of their bytes.

    Tells a fine-tuned model from its original even where the fingerprint, which hashes rows of
    the LM head, does not: fine-tuning often leaves the LM head alone.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def last_hidden_state(model: Any, ids_BL: Tensor) -> Tensor:
    """[B, L, D] behind the final norm, in the model's dtype, where its last layer lies; no logits.

    No attention mask: texts shorter than L are padded at their end, and causal attention never
    looks there. So the caller must leave the padded positions unread.
    """
    with torch.inference_mode():
        hidden_BLD: Tensor = model.base_model(
            input_ids=ids_BL.to(input_device(model)), use_cache=False
        ).last_hidden_state
    return hidden_BLD


def require_plain_head(model: Any) -> None:
    """Refuse a model whose LM head is anything but one matrix."""
    lm_head = model.get_output_embeddings()
    if lm_head is None or getattr(lm_head, "bias", None) is not None:
        found = "none" if lm_head is None else "one with a bias"
        raise HeadsError(
            f"target: LM head: found {found}; expected a plain projection without a bias"
        )


def check_last_hidden_state(model: Any) -> None:
    """Refuse a model whose LM head, on `last_hidden_state`, does not rank as its logits do."""
    require_plain_head(model)
    lm_head = model.get_output_embeddings()
    count = min(_CHECKED_IDS, int(model.config.get_text_config().vocab_size))
    ids_BL = torch.arange(count, device=input_device(model)).unsqueeze(0)
    with torch.inference_mode():
        # A spread model gives its logits on the first device, its LM head on its own.
        logits_LV = model(input_ids=ids_BL).logits[0].cpu()
        own_LV = lm_head(last_hidden_state(model, ids_BL)[0]).cpu()
    if not torch.equal(logits_LV.argmax(-1), own_LV.argmax(-1)):
        raise HeadsError(
            f"target: {type(model).__name__}: its base model's last hidden state is not what its "
            "LM head reads; expected an architecture whose final norm belongs to the base model"
        )


def read_rows(target: str) -> TargetRows:
    """Embedding and LM head of the target, bfloat16, and its fingerprint. Errors as `load_model`.

    From its files alone where they hold both under the model's own names: every worker calls this,
    and a large target's layers would fill the machine. Then the last hidden state is not checked
    here, but where states are made.
    """
    folder = resolve_target(target)
    model, found = outline(folder), None
    if model is not None:
        require_plain_head(model)
        found = read_stored(model, folder, torch.bfloat16)
    if found is None:
        model = load_model(target, device="cpu")
        found = (
            model.get_input_embeddings().weight.detach().clone(),
            model.get_output_embeddings().weight.detach().clone(),
        )
    return TargetRows(read_fingerprint(folder), *found, folder=folder)
