"""Tiny targets and heads on disk for the tests here. Imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_bpd.checkpoint import save_heads
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.fingerprint import read_fingerprint
from vllm_bpd.heads import BlockwiseHeads
from vllm_bpd.lattice import NUM_WEIGHTS

HIDDEN = 16
VOCAB = 48
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def fingerprint(**changed: Any) -> TargetFingerprint:
    """A target's fingerprint, `changed` fields replaced."""
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "lm_head_hash": "0" * 64,
    }
    return TargetFingerprint(**fields | changed)


def heads_config(**changed: Any) -> HeadsConfig:
    """A config of three heads, `changed` fields replaced."""
    fields: dict[str, Any] = {
        "num_draft_heads": 3,
        "head_hidden_size": 8,
        "target": fingerprint(),
    }
    return HeadsConfig(**fields | changed)


def random_heads(config: HeadsConfig, seed: int = 0) -> BlockwiseHeads:
    """Heads whose weights are all drawn, the output layer too."""
    torch.manual_seed(seed)
    return BlockwiseHeads(config)


def lattice_weights(places: int) -> Tensor:
    """Weights of a lattice of `places` places, all drawn."""
    return random_matrix(places, NUM_WEIGHTS, seed=3)


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix of numbers that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16().float()


def write_target(
    folder: Path,
    tensors: dict[str, Tensor] | None = None,
    file: str = "model.safetensors",
    **changed: Any,
) -> Path:
    """Write a Llama target: a config, and `tensors` (default: an embedding and an LM head)."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    values = {name: value for name, value in (values | changed).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if tensors is None:
        tensors = {
            EMBEDDING: random_matrix(VOCAB, HIDDEN, seed=1),
            LM_HEAD: random_matrix(VOCAB, HIDDEN, seed=2),
        }
    if tensors:
        save_file(tensors, folder / file)
    return folder


def write_heads(folder: Path, target: Path, **changed: Any) -> Path:
    """Write random heads for the target in folder `target`, with `lattice_places` a lattice too."""
    config = heads_config(**{"target": read_fingerprint(target)} | changed)
    ids_V = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
    weights_PW = None if config.lattice_places is None else lattice_weights(config.lattice_places)
    save_heads(folder, random_heads(config), ids_V, lattice_weights_PW=weights_PW)
    return folder


def one_line(error: BaseException) -> str:
    """The message of an error that a user reads, which must be one line."""
    text = str(error)
    assert text, "an error without a message"
    assert "\n" not in text, text
    return text
