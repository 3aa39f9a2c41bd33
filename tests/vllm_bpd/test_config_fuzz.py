"""Any options and any heads config: a valid engine config, or one clear error before it starts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the options are vLLM's")

from vllm import EngineArgs
from vllm.config import SpeculativeConfig

import vllm_bpd
from tests.vllm_bpd.samples import heads_config, one_line, write_heads, write_target
from vllm_bpd.checkpoint import expected_tensors
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.errors import HeadsError, named
from vllm_bpd.speculative import HEADS_FORMATS, BpdSpeculativeConfig

pytestmark = pytest.mark.row("config fuzz")

ROUNDS = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
NAMES = sorted(field.name for field in fields(BpdSpeculativeConfig))
OWN_OPTIONS = sorted(set(NAMES) - {field.name for field in fields(SpeculativeConfig)})
# What the engine fills in by itself; a user cannot reach these through a dict.
INTERNAL = ("target_model_config", "target_parallel_config", "draft_model_config",
            "draft_parallel_config")  # fmt: skip
ASKED = [name for name in NAMES if name not in INTERNAL and name != "method"]
# Drawn by what they are called: where a draw fails, Hypothesis writes down the strategy, and Python
# writes down no integer of more than 4300 digits, so that all one saw would be that.
NASTY_VALUES = {
    **{f"{sign}{base}**{power}": int(f"{sign}1") * base**power
       for sign in "+-" for base, power in ((2, 31), (2, 63), (2, 64), (10, 400), (10, 5000))},
    **{name: float(name) for name in ("nan", "inf", "-inf", "1e308", "-0.0", "5e-324")},
    "nested": [[[[[]]]]],
    "a list of 10**5000": [10**5000],
    "a line's end": "\n",
    "long": "x" * 1000,
}  # fmt: skip
NASTY = st.sampled_from(sorted(NASTY_VALUES)).map(lambda name: NASTY_VALUES[name])
PLAIN = st.one_of(
    NASTY,
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.just(1 << 40),
    st.floats(allow_nan=True, width=32),
    st.text(max_size=8),
    st.sampled_from(["", "bpd", "auto", "block", "synthetic", "probabilistic", "../x", "a/b"]),
)
SCHEDULES = st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=4), max_size=3)
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(st.text(max_size=4), PLAIN))
NUMBERS = st.one_of(st.integers(-1, 9), st.floats(0, 1), NASTY)
CONFIDENCES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.floats(0, 1)).map(list),
        st.lists(NUMBERS, min_size=2, max_size=4),
    ),
    max_size=2,
)
FORMATS = st.sampled_from([*HEADS_FORMATS, "pt", "npcache", "gguf", "PT", "Auto", ""])
OPTIONS = st.dictionaries(
    st.one_of(st.sampled_from(ASKED), st.text(max_size=6)), VALUES, max_size=3
)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "context_lookup": PLAIN,
        "context_window": NUMBERS,
        "min_confidence": NUMBERS,
        "min_confidence_per_batch_size": st.one_of(CONFIDENCES, VALUES),
        "heads_up_to_batch_size": NUMBERS,
        "draft_load_config": st.one_of(
            st.fixed_dictionaries({"load_format": st.one_of(FORMATS, PLAIN)}), VALUES
        ),
        "num_speculative_tokens": st.one_of(st.integers(-1, 9), PLAIN),
        "num_speculative_tokens_per_batch_size": st.one_of(SCHEDULES, PLAIN),
        "enforce_eager": PLAIN,
        "draft_tensor_parallel_size": PLAIN,
        "revision": PLAIN,
        "rejection_sample_method": PLAIN,
        "synthetic_acceptance_length": PLAIN,
        "synthetic_acceptance_rates": VALUES,
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and for it three heads, without and with a lattice of eight places."""
    vllm_bpd.register()
    folder = tmp_path_factory.mktemp("fuzz")
    write_target(folder / "target")
    write_heads(folder / "heads", folder / "target")
    write_heads(folder / "lattice", folder / "target", lattice_places=8)
    return folder


def attempt(folder: Path, heads: Path, options: dict[str, Any]) -> Any:
    """The speculative config that the engine makes of the options, or the one error it gives."""
    try:
        return EngineArgs(
            model=str(folder / "target"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            speculative_config={"method": "bpd", "model": str(heads), **options},
        ).create_engine_config().speculative_config  # fmt: skip
    except HeadsError as error:
        return error


# What an error may name: an option, a field of config.json, a tensor.
FIELDS = {
    *NAMES,
    *(field.name for field in fields(HeadsConfig)),
    *(f"target.{field.name}" for field in fields(TargetFingerprint)),
    *(field.name for field in fields(TargetFingerprint)),
    *("model_type", "target", "format_version"),
    *expected_tensors(heads_config(draft_vocab_size=3, lattice_places=3)),
}


def check(outcome: Any, heads: Path, given: dict[str, Any], most: int = 3) -> None:
    """A config that drafts one to `most` tokens, or our error: one short line naming a field.

    An error of Python's, or of pydantic's, is none: it would have been raised.
    """
    if not isinstance(outcome, HeadsError):
        assert isinstance(outcome, BpdSpeculativeConfig)
        assert 1 <= (outcome.num_speculative_tokens or 0) <= most
        return
    message = one_line(outcome)
    assert len(message) < 1000, message
    for prefix in ("config.json", "model.safetensors"):
        message = message.removeprefix(f"{heads / prefix}: ")
    message = message.removeprefix(f"{heads}: these heads belong to another target; ")
    if message.startswith("speculative_config: "):  # of vLLM's checks: the field is anywhere in it
        assert any(re.search(rf"\b{name}\b", message) for name in NAMES), message
        return
    names = FIELDS | {named(name) for name in given} | {
        named(name.replace("-", "_")) for name in given
    }  # fmt: skip
    names |= {f"target.{name}" for name in names}
    assert any(re.match(rf"{re.escape(name)}(\.|: )", message) for name in names), message


@ROUNDS
@given(options=st.one_of(OPTIONS, LIKELY), heads=st.sampled_from(["heads", "lattice"]))
@example(options={}, heads="heads")
@example(options={}, heads="lattice")
@example(options={"num_speculative_tokens": 1 << 40}, heads="heads")
@example(options={"model": ["a"]}, heads="heads")
@example(options={"model": "x" * 1000}, heads="heads")
@example(options={"model": "a/" + "x" * 1000, "revision": "x" * 1000}, heads="heads")
@example(options={"model": "a\0b"}, heads="heads")
@example(options={"model": "a/b", "revision": "a\0b"}, heads="heads")
@example(options={"min_confidence_per_batch_size": [[10**400, 5, 0.1]]}, heads="lattice")
@example(options={"context_window": 2**64}, heads="lattice")
@example(options={"draft_load_config": {"load_format": "pt"}}, heads="heads")
@example(options={"num_speculative_tokens": 10**5000}, heads="heads")
def test_any_options(folder: Path, options: dict[str, Any], heads: str) -> None:
    outcome = attempt(folder, folder / heads, options)
    check(outcome, folder / heads, options, 8 if heads == "lattice" else 3)


OWN = [*(f.name for f in fields(HeadsConfig)), *(f.name for f in fields(TargetFingerprint)), "x"]


@ROUNDS
@given(
    changes=st.dictionaries(st.sampled_from(OWN), VALUES, max_size=3),
    removed=st.sets(st.sampled_from(OWN), max_size=2),
    inside=st.booleans(),
    base=st.sampled_from(["heads", "lattice"]),
)
def test_any_heads_config(
    folder: Path, changes: dict[str, Any], removed: set[str], inside: bool, base: str
) -> None:
    """Fields of config.json replaced, added or taken away, at the top or inside `target`."""
    heads = folder / "changed"
    shutil.copytree(folder / base, heads, dirs_exist_ok=True)
    config = json.loads((folder / base / "config.json").read_text(encoding="utf-8"))
    place = config["target"] if inside else config
    place.update(changes)
    for name in removed:
        place.pop(name, None)
    try:
        text = json.dumps(config)
    except ValueError:  # an integer that Python does not write
        return
    (heads / "config.json").write_text(text, encoding="utf-8")
    check(attempt(folder, heads, {}), heads, changes, 9)


def test_the_fields_drawn_from_are_there() -> None:
    assert asdict(heads_config()).keys() <= set(OWN)
    assert "num_speculative_tokens" in ASKED
    assert {"context_window", "min_confidence_per_batch_size"} < set(OWN_OPTIONS) <= set(ASKED)
