"""Tiny random target models, written as Hugging Face checkpoints, most with no tokenizer.

Their weights are drawn wide, so that greedy text does not fall into a loop at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration_tests.harness.tokenizer import EOS, THINK_END, vocabulary, write_tokenizer

HIDDEN = 64
HEAD_DIM = 32
CONTEXT = 512
LOUD, SINK = 12.0, 20.0
TEXT_VOCAB = len(vocabulary())


@dataclass(frozen=True)
class Target:
    """A tiny model to write: its architecture, vocabulary, tying and seed."""

    name: str
    family: str  # as transformers names its classes: Llama, Qwen2, ...
    vocab: int
    tied: bool
    seed: int = 0
    dtype: str = "float32"
    text: bool = False  # it has a tokenizer
    boosted: dict[int, float] = field(default_factory=dict)  # LM-head rows that are scaled up
    bigram: bool = False  # the next token depends on the last one alone
    settled: bool = False  # it depends on little else, so that heads can foretell it
    sunk: bool = False  # every logit is below zero, which is what rows of padding give
    int8: bool = False  # linear layers as 8-bit integers (compressed-tensors)
    config: dict[str, Any] = field(default_factory=dict)  # further fields


TARGETS = {
    target.name: target
    for target in (
        Target("llama", "Llama", vocab=256, tied=False),
        Target("llama-tied", "Llama", vocab=128, tied=True),
        Target("qwen2", "Qwen2", vocab=512, tied=True),
        # For text: the end of a text comes every now and then, or the end of a thought.
        Target("text", "Llama", TEXT_VOCAB, tied=False, text=True, boosted={EOS: 2.0}),
        Target("think", "Llama", TEXT_VOCAB, tied=False, text=True, boosted={THINK_END: 1.6}),
        Target("settled", "Llama", TEXT_VOCAB, False, text=True, boosted={EOS: 1.3}, settled=True),
        # For sampling: eight tokens, and a distribution that can be written down.
        Target("bigram", "Llama", vocab=8, tied=False, bigram=True),
        # vLLM pads a vocabulary to a multiple of 64.
        Target("odd-vocabulary", "Llama", vocab=131, tied=False, sunk=True),
        Target("odd-tied", "Llama", vocab=67, tied=True),
        Target("qwen3", "Qwen3", vocab=128, tied=False),
        Target("mistral-window", "Mistral", 128, tied=False, config={"sliding_window": 24}),
        Target(
            "gemma3",
            "Gemma3",
            vocab=128,
            tied=True,
            config={"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        Target("gemma2", "Gemma2", vocab=128, tied=True, config={"sliding_window": 24}),
        Target("bfloat16", "Llama", vocab=128, tied=False, dtype="bfloat16"),
        Target("float16", "Llama", vocab=128, tied=False, dtype="float16"),
        Target("int8", "Llama", vocab=128, tied=False, int8=True),
    )
}
# Families whose head size follows from the hidden size, whatever the config says.
NO_HEAD_DIM = ("Qwen2",)


def write_target(target: Target, directory: Path) -> Path:
    """Write `target` into `directory` as a safetensors checkpoint."""
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
        "eos_token_id": EOS if target.text else None,
        "pad_token_id": None,
        **target.config,
    }
    if target.family in NO_HEAD_DIM:
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    suffix = "TextConfig" if target.family == "Gemma3" else "Config"
    config = getattr(transformers, f"{target.family}{suffix}")(**sizes)
    torch.manual_seed(target.seed)
    model = getattr(transformers, f"{target.family}ForCausalLM")(config).to(torch.float32)
    with torch.no_grad():
        shape_weights(target, model)
    model = model.to(getattr(torch, target.dtype))
    model.save_pretrained(directory, safe_serialization=True)
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    written["dtype"] = target.dtype
    (directory / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    if target.int8:
        quantise(directory)
    if target.text:
        write_tokenizer(directory)
    return directory


def shape_weights(target: Target, model: Any) -> None:
    """Make of random weights what the target is for."""
    for row, scale in target.boosted.items():
        model.lm_head.weight[row] *= scale
    if target.bigram or target.settled:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.005 * target.settled)
            layer.mlp.down_proj.weight.mul_(0.005 * target.settled)
    if target.sunk:  # one feature is large in every token and every layer leaves it alone
        model.model.embed_tokens.weight[:, 0] = LOUD
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = -SINK
    if target.bigram:
        model.lm_head.weight.mul_(0.4)  # near enough to even that every pair is seen


def quantise(directory: Path) -> None:
    """Turn the linear layers of a checkpoint into int8 with a scale for each output channel."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        weight = tensors[name]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-127, 127).char()
        tensors[name + "_scale"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**shared, "strategy": "channel", "dynamic": False},
                "input_activations": {**shared, "strategy": "token", "dynamic": True},
            }
        },
    }
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
