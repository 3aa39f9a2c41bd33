"""A tiny random target, made on the spot, and greedy answers by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads_training.hidden_states import write_states
from heads_training.records import Record
from heads_training.target import load_model, read_rows
from heads_training.train import TrainingData, prepare
from tests.heads_training.made_data import TINY
from tests.heads_training.tiny_chat import write_chat_target

VOCAB_SIZE = 97  # ids of the tiny target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Llama whose random weights are large enough to say varied things."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("target")
    model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_records(tiny_target: Path) -> list[Record]:
    """Greedy answers of different lengths to random prompts of different lengths."""
    model = load_model(str(tiny_target))
    generator = torch.Generator().manual_seed(1)
    records = []
    for i in range(12):
        prompt = torch.randint(2, VOCAB_SIZE, (3 + i % 5,), generator=generator)
        ids = prompt.tolist()
        for _ in range(20 + 3 * (i % 4)):
            with torch.inference_mode():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        cut = len(prompt)
        records.append(Record(ids[:cut], ids[cut:], "length", "even" if i % 2 == 0 else "odd:a"))
    return records


@pytest.fixture(scope="session")
def tiny_answers(tiny_records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny records in two answer files."""
    folder = tmp_path_factory.mktemp("answers")
    for number, part in enumerate((tiny_records[:7], tiny_records[7:])):
        lines = "".join(json.dumps(record.__dict__) + "\n" for record in part)
        (folder / f"answers-{number:05d}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny float32 Llama with a tokenizer and a ChatML template."""
    return write_chat_target(tmp_path_factory.mktemp("chat-target"))


@pytest.fixture(scope="session")
def tiny_data(
    tiny_target: Path, tiny_answers: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingData:
    """The tiny records as training reads them, with `TINY`'s options."""
    shards = write_states(str(tiny_target), tiny_answers, tmp_path_factory.mktemp("states"))
    return prepare(TINY, shards, read_rows(str(tiny_target)))
