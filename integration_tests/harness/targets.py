"""Tiny random target models, written as Hugging Face checkpoints with no tokenizer.

Their weights are drawn wide, so that greedy text does not fall into a loop at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN = 64
HEAD_DIM = 32
CONTEXT = 512


@dataclass(frozen=True)
class Target:
    """A tiny model to write: its architecture, vocabulary, tying and seed."""

    name: str
    family: str
    vocab: int
    tied: bool
    seed: int = 0


TARGETS = {
    target.name: target
    for target in (
        Target("llama", "llama", vocab=256, tied=False),
        Target("llama-tied", "llama", vocab=128, tied=True),
        Target("qwen2", "qwen2", vocab=512, tied=True),
    )
}


def write_target(target: Target, directory: Path) -> Path:
    """Write `target` into `directory` as a float32 safetensors checkpoint."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": target.vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": target.tied,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if target.family == "qwen2":
        # It takes its head size from the hidden size, whatever the config says.
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    classes = {"llama": "Llama", "qwen2": "Qwen2"}
    family = classes[target.family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(target.seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32)
    model.save_pretrained(directory, safe_serialization=True)
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    written["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    return directory
