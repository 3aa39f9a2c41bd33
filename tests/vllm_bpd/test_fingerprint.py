"""Which target a checkpoint is, read from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.vllm_bpd.samples import (
    EMBEDDING,
    HIDDEN,
    LM_HEAD,
    VOCAB,
    fingerprint,
    one_line,
    random_matrix,
    write_target,
)
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import (
    explain_mismatch,
    hash_rows,
    hashed_row_ids,
    lm_head_hash,
    read_fingerprint,
    stored_matrix,
    stores_lm_head,
)

EMBEDDING_VD = random_matrix(VOCAB, HIDDEN, seed=1)
LM_HEAD_VD = random_matrix(VOCAB, HIDDEN, seed=2)


def expected_hash(matrix_VD: Tensor) -> str:
    return hash_rows(matrix_VD[hashed_row_ids(VOCAB)])


@given(st.integers(1, 2**20))
def test_hashed_rows_are_spread_over_the_whole_vocabulary(vocab: int) -> None:
    ids = hashed_row_ids(vocab)
    assert len(ids) == min(16, vocab) == len(set(ids))
    assert ids == sorted(ids)
    assert ids[0] == 0
    assert ids[-1] == vocab - 1 or vocab == 1


def test_an_untied_target_is_hashed_by_its_lm_head(tmp_path: Path) -> None:
    found = read_fingerprint(write_target(tmp_path))
    assert found == fingerprint(lm_head_hash=expected_hash(LM_HEAD_VD))


def test_a_tied_target_is_hashed_by_its_embedding(tmp_path: Path) -> None:
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD}, tie_word_embeddings=True)
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(EMBEDDING_VD)


def test_a_config_that_says_nothing_of_tying_is_taken_for_tied(tmp_path: Path) -> None:
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD}, tie_word_embeddings=None)
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(EMBEDDING_VD)


def test_a_stored_lm_head_wins_over_tying(tmp_path: Path) -> None:
    """As in transformers and vLLM, which compare the two and untie."""
    write_target(tmp_path, tie_word_embeddings=True)
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(LM_HEAD_VD)


def test_an_untied_target_without_an_lm_head_has_no_hash(tmp_path: Path) -> None:
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD})
    assert read_fingerprint(tmp_path).lm_head_hash is None


@pytest.mark.parametrize("tied", [False, None])
@pytest.mark.parametrize(
    "quantised",
    [
        {"lm_head.qweight": torch.zeros(2, VOCAB, dtype=torch.int32)},
        {LM_HEAD: LM_HEAD_VD.to(torch.int8), "lm_head.weight_scale": torch.ones(VOCAB)},
        {LM_HEAD: LM_HEAD_VD.to(torch.float8_e4m3fn), "lm_head.weight_scale": torch.ones(1)},
        {LM_HEAD: torch.zeros(VOCAB, HIDDEN // 2, dtype=torch.uint8)},
    ],
    ids=["gptq", "int8", "fp8", "packed"],
)
def test_a_quantised_lm_head_has_no_hash(
    tmp_path: Path, quantised: dict[str, Tensor], tied: bool | None
) -> None:
    """Not the embedding's, by which heads of the unquantised target would be refused."""
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD, **quantised}, tie_word_embeddings=tied)
    assert read_fingerprint(tmp_path).lm_head_hash is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_stored_dtype_does_not_matter(tmp_path: Path, dtype: torch.dtype) -> None:
    write_target(tmp_path, {LM_HEAD: LM_HEAD_VD.to(dtype)})
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(LM_HEAD_VD)


def test_padding_does_not_matter(tmp_path: Path) -> None:
    padded = torch.cat([LM_HEAD_VD, torch.full((16, HIDDEN), 9.0)])
    write_target(tmp_path, {LM_HEAD: padded})
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(LM_HEAD_VD)


def test_another_row_gives_another_hash(tmp_path: Path) -> None:
    changed = LM_HEAD_VD.clone()
    changed[-1, -1] += 1
    write_target(tmp_path, {LM_HEAD: changed})
    assert read_fingerprint(tmp_path).lm_head_hash != expected_hash(LM_HEAD_VD)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "embed_out.weight",
        "output.weight",
        "transformer.output_layer.weight",
        "language_model.lm_head.weight",
    ],
)
def test_names_of_lm_heads(tmp_path: Path, name: str) -> None:
    write_target(tmp_path, {name: LM_HEAD_VD, EMBEDDING: EMBEDDING_VD})
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(LM_HEAD_VD)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "gpt_neox.embed_in.weight",
        "backbone.embeddings.weight",
        "transformer.word_embeddings.weight",
    ],
)
def test_names_of_embeddings(tmp_path: Path, name: str) -> None:
    write_target(tmp_path, {name: EMBEDDING_VD}, tie_word_embeddings=True)
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(EMBEDDING_VD)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.attention.output.weight",
        "model.layers.2.lm_head.weight",
        "model.layers.2.embed_tokens.weight",
        "a.attn_output.weight",
        "a.position_embeddings.weight",
    ],
)
def test_what_only_ends_like_one_is_none(tmp_path: Path, name: str) -> None:
    write_target(tmp_path, {name: LM_HEAD_VD}, tie_word_embeddings=True)
    assert read_fingerprint(tmp_path).lm_head_hash is None
    write_target(tmp_path, {name: LM_HEAD_VD, EMBEDDING: EMBEDDING_VD}, tie_word_embeddings=True)
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(EMBEDDING_VD)


def test_a_matrix_is_found_by_its_name_and_shape(tmp_path: Path) -> None:
    path = write_target(tmp_path) / "model.safetensors"
    assert stored_matrix(tmp_path, LM_HEAD, (VOCAB, HIDDEN)) == path
    assert stored_matrix(tmp_path, LM_HEAD, (VOCAB + 1, HIDDEN)) is None
    assert stored_matrix(tmp_path, "output.weight", (VOCAB, HIDDEN)) is None
    assert stores_lm_head(tmp_path)
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD, LM_HEAD: LM_HEAD_VD.to(torch.int8)})
    assert stored_matrix(tmp_path, LM_HEAD, (VOCAB, HIDDEN)) is None  # its scale is elsewhere
    assert stores_lm_head(tmp_path)
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD})
    assert not stores_lm_head(tmp_path)
    path.write_bytes(b"nonsense")
    assert stored_matrix(tmp_path, EMBEDDING, (VOCAB, HIDDEN)) is None


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_searched(tmp_path: Path, indexed: bool) -> None:
    write_target(tmp_path, {EMBEDDING: EMBEDDING_VD}, "model-00001-of-00002.safetensors")
    save_file({LM_HEAD: LM_HEAD_VD}, tmp_path / "model-00002-of-00002.safetensors")
    if indexed:
        weight_map = {
            EMBEDDING: "model-00001-of-00002.safetensors",
            LM_HEAD: "model-00002-of-00002.safetensors",
        }
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    assert read_fingerprint(tmp_path).lm_head_hash == expected_hash(LM_HEAD_VD)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
def test_a_broken_index_gives_no_hash(tmp_path: Path, text: str) -> None:
    write_target(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert read_fingerprint(tmp_path).lm_head_hash is None


def test_weights_that_cannot_be_read_give_no_hash(tmp_path: Path) -> None:
    write_target(tmp_path, {})
    assert read_fingerprint(tmp_path).lm_head_hash is None
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert read_fingerprint(tmp_path).lm_head_hash is None
    assert lm_head_hash(tmp_path / "gone", VOCAB, HIDDEN) is None


def test_sizes_of_a_nested_text_config_are_taken(tmp_path: Path) -> None:
    write_target(
        tmp_path,
        hidden_size=None,
        vocab_size=None,
        num_hidden_layers=None,
        text_config={"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2},
    )
    assert read_fingerprint(tmp_path) == fingerprint(lm_head_hash=expected_hash(LM_HEAD_VD))


def test_gpt2_names_of_sizes_are_taken(tmp_path: Path) -> None:
    write_target(tmp_path, hidden_size=None, num_hidden_layers=None, n_embd=HIDDEN, n_layer=2)
    assert read_fingerprint(tmp_path) == fingerprint(lm_head_hash=expected_hash(LM_HEAD_VD))


def refusal(folder: Path) -> str:
    with pytest.raises(HeadsError) as caught:
        read_fingerprint(folder)
    message = one_line(caught.value)
    assert message.startswith(f"{folder / 'config.json'}: ")
    return message


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_target_without_sizes_is_refused(tmp_path: Path, name: str) -> None:
    missing: dict[str, Any] = {name: None}
    wrong: dict[str, Any] = {name: "x"}
    assert f"{name}: missing" in refusal(write_target(tmp_path, None, **missing))
    assert f"{name}: found 'x'" in refusal(write_target(tmp_path, None, **wrong))


@pytest.mark.parametrize("value", [None, []])
def test_a_target_without_an_architecture_is_refused(tmp_path: Path, value: Any) -> None:
    assert "architecture: missing" in refusal(write_target(tmp_path, architectures=value))


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_config_is_no_target(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refusal(tmp_path)


def test_the_same_target_explains_nothing() -> None:
    assert explain_mismatch(fingerprint(), fingerprint()) is None


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("hidden_size", 576, 2048),
        ("vocab_size", 49152, 32000),
        ("num_hidden_layers", 30, 16),
        ("architecture", "LlamaForCausalLM", "Qwen2ForCausalLM"),
    ],
)
def test_a_mismatch_names_field_and_both_values(name: str, ours: Any, theirs: Any) -> None:
    assert explain_mismatch(fingerprint(**{name: ours}), fingerprint(**{name: theirs})) == (
        f"{name}: the heads were trained for {ours}, this target has {theirs}"
    )


def test_another_lm_head_is_another_target() -> None:
    message = explain_mismatch(fingerprint(lm_head_hash="a" * 64), fingerprint())
    assert message == (
        f"lm_head_hash: the heads were trained for {'a' * 12}, this target has {'0' * 12} "
        "(another model of the same shape)"
    )


@pytest.mark.parametrize(("ours", "theirs"), [(None, "a" * 64), ("a" * 64, None), (None, None)])
def test_an_unknown_hash_is_no_mismatch(ours: str | None, theirs: str | None) -> None:
    assert (
        explain_mismatch(fingerprint(lm_head_hash=ours), fingerprint(lm_head_hash=theirs)) is None
    )
