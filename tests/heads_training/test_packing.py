"""Packed texts give what each gives alone, and a mask that leaks is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from heads_training.packing import (
    fill_rows,
    pack,
    packed_hidden_state,
    require_packable,
)
from vllm_bpd.errors import HeadsError

# Of float32 states whose values are around 1; two orders of summation differ by less than 1e-5.
TOLERANCE = 1e-4
LENGTHS = (11, 1, 24, 6, 17, 2, 9)
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 5},  # shorter than the texts
}


def make(family: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        attn_implementation=attention,
        **FAMILIES[family],
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def make_texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(97, (n,), generator=generator).tolist() for n in LENGTHS]


def alone(model: Any, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = model.base_model(torch.tensor([text])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_forward_equals_single_ones(family: str, attention: str) -> None:
    model, texts = make(family, attention), make_texts()
    packed = pack(texts, 30)
    assert packed.input_ids_BL.shape == (3, 30)
    with torch.inference_mode():
        hidden_BLD = packed_hidden_state(model, packed)
    for number, text in enumerate(texts):
        found_AD = packed.text(hidden_BLD, number)
        torch.testing.assert_close(found_AD, alone(model, text), rtol=0, atol=TOLERANCE)
    require_packable(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_leaking_mask_is_far_outside_the_tolerance(family: str) -> None:
    model, texts = make(family), make_texts()
    packed = pack(texts, 30)
    causal_BLL = torch.ones(3, 1, 30, 30, dtype=torch.bool).tril()
    with torch.inference_mode():
        hidden_BLD = model.base_model(
            input_ids=packed.input_ids_BL,
            position_ids=packed.position_ids_BL,
            attention_mask=causal_BLL,
        ).last_hidden_state
    behind = [i for i, (_, first) in enumerate(packed.places) if first]
    assert len(behind) == 4
    for number in behind:
        error = (packed.text(hidden_BLD, number) - alone(model, texts[number])).abs().max()
        assert error > 1000 * TOLERANCE


def block_mask(segments_BL: torch.Tensor) -> torch.Tensor:
    """[B, 1, L, L] bool: each token may look at those of its text before it, and at itself."""
    return (segments_BL.unsqueeze(2) == segments_BL.unsqueeze(1)).tril().unsqueeze(1)


def test_the_mask_says_the_same_as_the_positions() -> None:
    model, packed = make("Llama"), pack(make_texts(), 30)
    with torch.inference_mode():
        by_positions = packed_hidden_state(model, packed)
        by_mask = model.base_model(
            input_ids=packed.input_ids_BL,
            position_ids=packed.position_ids_BL,
            attention_mask=block_mask(packed.segments_BL),
        ).last_hidden_state
    torch.testing.assert_close(by_mask, by_positions, rtol=0, atol=TOLERANCE)


def test_gradients_stay_inside_a_text() -> None:
    model, texts = make("Llama"), make_texts()
    packed = pack(texts, 30)
    number = packed.segments_BL[0, -1].item()  # the last text of a full row
    embeddings: list[torch.Tensor] = []

    def keep(_module: Any, _given: Any, made: torch.Tensor) -> None:
        made.retain_grad()
        embeddings.append(made)

    hook = model.get_input_embeddings().register_forward_hook(keep)
    packed.text(packed_hidden_state(model, packed), int(number)).sum().backward()
    hook.remove()
    touched_BL = embeddings[0].grad.abs().sum(-1) > 0  # type: ignore[union-attr]
    assert torch.equal(touched_BL, packed.segments_BL == number)


def test_a_model_that_leaks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda _: None)
    with pytest.raises(HeadsError, match="LlamaForCausalLM: packed texts leak"):
        require_packable(make("Llama"))


def test_rows_are_filled() -> None:
    rows = fill_rows(LENGTHS, 30)
    assert sorted(i for row in rows for i in row) == list(range(len(LENGTHS)))
    assert [sum(LENGTHS[i] for i in row) for row in rows] == [30, 30, 10]
    with pytest.raises(HeadsError, match="capacity: found 23 tokens a row, and a text of 24"):
        fill_rows(LENGTHS, 23)
    packed = pack([[5, 6], [7, 8, 9]], 9)
    assert packed.input_ids_BL.tolist() == [[7, 8, 9, 5, 6]]  # no longer than it has to be
    assert packed.position_ids_BL.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.segments_BL.tolist() == [[1, 1, 1, 0, 0]]
    assert packed.text(packed.input_ids_BL, 0).tolist() == [5, 6]
