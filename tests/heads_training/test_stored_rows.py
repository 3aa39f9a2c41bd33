"""Embedding and LM head from the files are those of the model, which is not loaded for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
)

from heads_training import target
from heads_training.target import load_model, read_rows
from vllm_bpd.errors import HeadsError

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **NO_IDS,
}


def write(
    folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16, shard: str = "1GB"
) -> Path:
    """A target of random weights, the two matrices told apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def llama(folder: Path, tied: bool = False, **options: Any) -> Path:
    return write(folder, LlamaConfig(**SIZES, tie_word_embeddings=tied), **options)


def rename(folder: Path, changes: dict[str, str | None]) -> None:
    """Store tensors under other names, or none."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in changes.items():
        tensor = tensors.pop(old)
        if new is not None:
            tensors[new] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def loaded(folder: Path) -> tuple[Tensor, Tensor]:
    """By loading the whole model."""
    model = load_model(str(folder), device="cpu")
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def assert_rows(folder: Path) -> None:
    found = read_rows(str(folder))
    embedding_VD, lm_head_VD = loaded(folder)
    assert found.embedding_VD.dtype == found.lm_head_VD.dtype == torch.bfloat16
    assert torch.equal(found.embedding_VD, embedding_VD)
    assert torch.equal(found.lm_head_VD, lm_head_VD)
    assert found.folder == folder


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that `read_rows` loads whole."""
    found = []

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return load_model(name, *args, **kwargs)

    monkeypatch.setattr(target, "load_model", load)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_two_tensors_are_read_and_no_model(
    tied: bool, shard: str, dtype: torch.dtype, tmp_path: Path, loads: list[str]
) -> None:
    llama(tmp_path, tied, dtype=dtype, shard=shard)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard == "20KB")
    assert_rows(tmp_path)
    assert loads == []


def test_the_model_says_what_its_parts_are_called(tmp_path: Path, loads: list[str]) -> None:
    write(tmp_path, GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, **NO_IDS))
    assert_rows(tmp_path)
    assert loads == []


def test_a_stored_lm_head_wins_over_the_tie(tmp_path: Path, loads: list[str]) -> None:
    llama(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    assert '"tie_word_embeddings": false' in text
    config.write_text(text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    found = read_rows(str(tmp_path))
    assert not torch.equal(found.embedding_VD, found.lm_head_VD)
    assert loads == []


def test_files_with_other_names_are_loaded_whole(tmp_path: Path, loads: list[str]) -> None:
    """GPT-NeoX's files call the LM head `embed_out`, transformers' model `lm_head`."""
    write(tmp_path, GPTNeoXConfig(**SIZES))
    assert_rows(tmp_path)
    assert loads == [str(tmp_path)]


def test_files_without_the_models_prefix_are_loaded_whole(tmp_path: Path, loads: list[str]) -> None:
    llama(tmp_path)
    rename(tmp_path, {"model.embed_tokens.weight": "embed_tokens.weight"})
    assert_rows(tmp_path)
    assert loads == [str(tmp_path)]


def test_a_matrix_of_another_shape_is_not_taken(tmp_path: Path, loads: list[str]) -> None:
    llama(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.zeros(98, 64, dtype=torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(Exception, match="mismatch"):  # transformers' own
        read_rows(str(tmp_path))
    assert loads == [str(tmp_path)]


def test_an_lm_head_with_a_bias_is_refused(tmp_path: Path, loads: list[str]) -> None:
    write(tmp_path, PhiConfig(**SIZES))
    with pytest.raises(HeadsError, match="LM head: found one with a bias"):
        read_rows(str(tmp_path))
    assert loads == []


def test_a_folder_without_weights_is_refused_as_before(tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(HeadsError, match="transformers cannot load it"):
        read_rows(str(tmp_path))


def test_an_unknown_architecture_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(HeadsError, match="transformers cannot load it"):
        read_rows(str(tmp_path))


def test_tied_rows_are_one_tensor(tmp_path: Path) -> None:
    found = read_rows(str(llama(tmp_path, tied=True)))
    assert found.embedding_VD.data_ptr() == found.lm_head_VD.data_ptr()
    assert LlamaForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings
