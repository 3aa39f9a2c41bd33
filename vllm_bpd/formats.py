"""Makes the checkpoint known to transformers and vLLM through their official registries."""

from __future__ import annotations


def register_with_vllm() -> None:
    """Register the config class and the model class. Idempotent."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from vllm_bpd.config import ARCHITECTURE, MODEL_TYPE, BpdConfig

    AutoConfig.register(MODEL_TYPE, BpdConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # A string, so that no model code is imported (and no device touched) before it is used.
        ModelRegistry.register_model(ARCHITECTURE, "vllm_bpd.model:BlockwiseHeadsModel")
