"""The heads' config: what it refuses and how it says so, and its Hugging Face face."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from tests.vllm_bpd.samples import fingerprint, heads_config, one_line
from vllm_bpd.config import MODEL_TYPE, BpdConfig, HeadsConfig, TargetFingerprint
from vllm_bpd.errors import HeadsError

pytestmark = pytest.mark.row("checkpoints")

REQUIRED = ["num_draft_heads", "head_hidden_size", "target"]
OPTIONAL = [f.name for f in fields(HeadsConfig) if f.name not in REQUIRED]
TARGET_REQUIRED = ["architecture", "num_hidden_layers", "hidden_size", "vocab_size"]


def values() -> dict[str, Any]:
    """A config.json with every field given and different from its default."""
    config = heads_config(
        activation="relu", conditioning="none", draft_vocab_size=7, lattice_places=5
    )
    return json.loads(json.dumps(config.to_dict()))  # type: ignore[no-any-return]


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(HeadsError) as caught:
        HeadsConfig.from_dict(given)
    return one_line(caught.value)


def test_what_is_written_is_read_back() -> None:
    assert HeadsConfig.from_dict(values()).to_dict() == values()


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_must_be_there(name: str) -> None:
    given = values()
    del given[name]
    message = refusal(given)
    assert message.startswith(f"{name}: ")
    assert "missing" in message or "found None" in message


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_field_has_a_default(name: str) -> None:
    given = values()
    del given[name]
    default = {f.name: f.default for f in fields(HeadsConfig)}[name]
    assert getattr(HeadsConfig.from_dict(given), name) == default


@pytest.mark.parametrize("name", TARGET_REQUIRED)
def test_a_required_field_of_the_target_must_be_there(name: str) -> None:
    given = values()
    del given["target"][name]
    assert refusal(given).startswith(f"target.{name}: missing")


def test_the_hash_may_be_unknown() -> None:
    given = values()
    del given["target"]["lm_head_hash"]
    assert HeadsConfig.from_dict(given).target.lm_head_hash is None


@pytest.mark.parametrize(
    "name", ["num_draft_heads", "head_hidden_size", "draft_vocab_size", "lattice_places"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "3", True, [3]])
def test_sizes_are_whole_positive_numbers(name: str, value: Any) -> None:
    message = refusal(values() | {name: value})
    assert message.startswith(f"{name}: found {value!r}; expected a whole number")


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [0, None, "3", True])
def test_sizes_of_the_target_are_whole_positive_numbers(name: str, value: Any) -> None:
    given = values()
    given["target"][name] = value
    assert refusal(given).startswith(f"target.{name}: found {value!r}; expected a whole number")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", None),
        ("architecture", 5),
        ("architecture", ""),
        ("architecture", ["LlamaForCausalLM"]),
        ("lm_head_hash", 5),
        ("lm_head_hash", "0" * 63),
        ("lm_head_hash", "G" * 64),
    ],
)
def test_the_target_has_a_name_and_a_hash_of_ours(name: str, value: Any) -> None:
    given = values()
    given["target"][name] = value
    assert refusal(given).startswith(f"target.{name}: found {value!r}; expected")


@pytest.mark.parametrize("target", [None, [], "LlamaForCausalLM", 3])
def test_the_target_is_an_object(target: Any) -> None:
    message = refusal(values() | {"target": target})
    assert message.startswith(f"target: found {target!r}")
    assert "lm_head_hash" in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("activation", "tanh", "relu, silu, gelu"),
        ("activation", None, "relu, silu, gelu"),
        ("activation", ["silu"], "relu, silu, gelu"),
        ("conditioning", "all", "none, sampled_token"),
        ("conditioning", None, "none, sampled_token"),
    ],
)
def test_choices_are_listed(name: str, value: Any, allowed: str) -> None:
    assert refusal(values() | {name: value}) == (
        f"{name}: found {value!r}; expected one of {allowed}"
    )


@pytest.mark.parametrize("value", [0, 2, "1", None, True, 1.0])
def test_another_format_version_says_what_to_do(value: Any) -> None:
    message = refusal(values() | {"format_version": value})
    assert message.startswith(f"format_version: found {value!r}; this vllm-bpd reads 1")
    assert "export the heads again" in message


@pytest.mark.parametrize(
    ("name", "near"), [("num_draft_head", "num_draft_heads"), ("activations", "activation")]
)
def test_a_misspelt_field_names_the_near_one(name: str, near: str) -> None:
    message = refusal(values() | {name: 3})
    assert message.startswith(f"{name}: unknown field")
    assert message.endswith(f"did you mean {near}?")


def test_an_unknown_field_far_from_any_gives_no_hint() -> None:
    message = refusal(values() | {"zzz": 1})
    assert message.startswith("zzz: unknown field; expected num_draft_heads")
    assert "did you mean" not in message


def test_a_misspelt_field_of_the_target_names_the_near_one() -> None:
    given = values()
    given["target"]["hiden_size"] = 3
    assert refusal(given).endswith("did you mean target.hidden_size?")


@pytest.mark.parametrize("model_type", [None, "llama", 3])
def test_another_model_type_is_no_heads(model_type: Any) -> None:
    assert refusal(values() | {"model_type": model_type}).startswith(
        f"model_type: found {model_type!r}; expected 'bpd'"
    )


def test_the_draft_vocabulary_fits_into_the_targets() -> None:
    assert heads_config(draft_vocab_size=48).scored_vocab_size == 48
    with pytest.raises(HeadsError) as caught:
        heads_config(draft_vocab_size=49)
    assert one_line(caught.value) == (
        "draft_vocab_size: found 49; expected at most the target's vocab_size 48"
    )


@pytest.mark.parametrize(("places", "most"), [(None, 3), (3, 3), (8, 8)])
def test_a_lattice_drafts_at_least_as_much_as_the_heads(places: int | None, most: int) -> None:
    assert heads_config(lattice_places=places).max_drafts == most


def test_a_lattice_of_fewer_places_than_heads_is_refused() -> None:
    with pytest.raises(HeadsError) as caught:
        heads_config(lattice_places=2)
    assert one_line(caught.value) == (
        "lattice_places: found 2; expected at least num_draft_heads, 3, or null"
    )


@pytest.mark.parametrize(("conditioning", "size"), [("none", 16), ("sampled_token", 32)])
def test_sizes_follow_from_the_fields(conditioning: str, size: int) -> None:
    config = heads_config(conditioning=conditioning)
    assert (config.hidden_size, config.input_size) == (16, size)
    assert (config.joint_hidden_size, config.scored_vocab_size) == (24, 48)


@given(
    heads=st.integers(1, 64),
    width=st.integers(1, 2**20),
    vocab=st.integers(1, 2**24),
    activation=st.sampled_from(["relu", "silu", "gelu"]),
    conditioning=st.sampled_from(["none", "sampled_token"]),
    data=st.data(),
)
def test_every_valid_config_survives_json(
    heads: int, width: int, vocab: int, activation: str, conditioning: str, data: st.DataObject
) -> None:
    draft = data.draw(st.none() | st.integers(1, vocab))
    places = data.draw(st.none() | st.integers(heads, 128))
    config = heads_config(
        num_draft_heads=heads,
        head_hidden_size=width,
        activation=activation,
        conditioning=conditioning,
        draft_vocab_size=draft,
        lattice_places=places,
        target=fingerprint(vocab_size=vocab),
    )
    assert HeadsConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    AutoConfig.register(MODEL_TYPE, BpdConfig, exist_ok=True)


def test_transformers_loads_a_checkpoints_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values()))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, BpdConfig)
    assert config.heads == HeadsConfig.from_dict(values())
    assert (config.hidden_size, config.vocab_size) == (16, 48)


def test_the_hugging_face_config_survives_saving(tmp_path: Path) -> None:
    BpdConfig(**values()).save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.heads == HeadsConfig.from_dict(values())
    written = json.loads((tmp_path / "config.json").read_text())
    assert HeadsConfig.from_dict(written) == HeadsConfig.from_dict(values())


def test_the_hugging_face_config_is_strict_at_use() -> None:
    assert BpdConfig().hidden_size is None  # transformers builds one without fields
    with pytest.raises(HeadsError, match="target: found None"):
        _ = BpdConfig().heads
    with pytest.raises(HeadsError, match="num_draft_heads: found 0"):
        _ = BpdConfig(**values() | {"num_draft_heads": 0}).heads


def test_the_fingerprint_is_plain_json() -> None:
    made = fingerprint()
    assert TargetFingerprint(**json.loads(json.dumps(asdict(made)))) == made
