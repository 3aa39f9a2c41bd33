"""Random LoRA adapters for the tiny Llama targets, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 4
MODULES = ("q_proj", "v_proj", "o_proj")


def write_adapter(target: Path, directory: Path, seed: int) -> Path:
    """Write an adapter for `target`, strong enough to change what it says."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_file(target / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith(MODULES):
            rows, columns = weight.shape
            tensors[f"base_model.model.{stem}.lora_A.weight"] = torch.randn(RANK, columns) * 0.3
            tensors[f"base_model.model.{stem}.lora_B.weight"] = torch.randn(rows, RANK) * 0.3
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
