"""Small tokenizers with the chat templates of five families, and a tiny target that has one.

The templates are this project's own, as short as the families' structure allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEXT = (
    "The ship left the harbour in the morning. What is the name of the ship? It is called the "
    "Swan. Who is the captain? I think that the captain is new. Answer: the sea is calm today. "
)

# <|im_start|>ROLE, a line break, the turn, <|im_end|>, a line break.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A header for each turn, two line breaks, the turn stripped, <|eot|>.
HEADERS = (
    "<|bos|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
# [INST] user [/INST] answer </s>; no mark of its own opens an answer, and roles must alternate.
INSTRUCTIONS = (
    "<s>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Turns by the user and by the model; the stop token is not the tokenizer's own.
TURNS = (
    "<bos>{% for m in messages %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# Thinking is taken out of every answer that a user turn follows.
THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < last.user and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A chat template, its special tokens, and how its tokenizer splits text."""

    template: str
    special: tuple[str, ...]
    eos: str  # the tokenizer's own
    stop: str  # what ends an answer
    words: bool = False  # pieces begin with a mark for the space before; else bytes


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "headers": Family(
        HEADERS, ("<|bos|>", "<|head|>", "<|/head|>", "<|eot|>"), "<|eot|>", "<|eot|>"
    ),
    "instructions": Family(
        INSTRUCTIONS, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", words=True
    ),
    "turns": Family(TURNS, ("<bos>", "<eos>", "<turn>", "</turn>"), "<eos>", "</turn>", words=True),
    "thinking": Family(THINKING, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
}


def make_tokenizer(family: Family) -> Any:
    """A byte-pair tokenizer of about 300 ids, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family.words:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
        alphabet = ["\n", *(chr(code) for code in range(32, 127))]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(family.special), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, chat_template=family.template
    )


def write_chat_target(folder: Path, seed: int = 0, family: str = "chatml") -> Path:
    """A two-layer Llama of random weights, float32, with the family's tokenizer."""
    tokenizer = make_tokenizer(FAMILIES[family])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
