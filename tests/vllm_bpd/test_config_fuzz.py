"""Any options and any heads config: a valid engine config, or one clear error before it starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the options are vLLM's")

from pydantic import ValidationError
from vllm import EngineArgs
from vllm.config import SpeculativeConfig

import vllm_bpd
from tests.vllm_bpd.samples import heads_config, write_heads, write_target
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.errors import HeadsError
from vllm_bpd.speculative import BpdSpeculativeConfig

pytestmark = pytest.mark.row("config fuzz")

ROUNDS = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
NAMES = sorted(field.name for field in fields(SpeculativeConfig))
# What the engine fills in by itself; a user cannot reach these through a dict.
INTERNAL = ("target_model_config", "target_parallel_config", "draft_model_config",
            "draft_parallel_config")  # fmt: skip
ASKED = [name for name in NAMES if name not in INTERNAL and name != "method"]
PLAIN = st.one_of(
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
OPTIONS = st.dictionaries(
    st.one_of(st.sampled_from(ASKED), st.text(max_size=6)), VALUES, max_size=3
)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "num_speculative_tokens": st.one_of(st.integers(-1, 5), PLAIN),
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
    """A target and three heads for it."""
    vllm_bpd.register()
    folder = tmp_path_factory.mktemp("fuzz")
    write_target(folder / "target")
    write_heads(folder / "heads", folder / "target")
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
    except ValidationError as error:  # a refusal of vLLM's own checks, in its own words
        if [one["type"] for one in error.errors(include_url=False)] != ["value_error"]:
            raise
        return error


def check(outcome: Any) -> None:
    """A config that serves one to three heads, or an error of one line."""
    if isinstance(outcome, HeadsError):
        message = str(outcome)
        assert message
        assert "\n" not in message, message
        assert ":" in message
        return
    if isinstance(outcome, ValidationError):
        return
    assert isinstance(outcome, BpdSpeculativeConfig)
    assert 1 <= (outcome.num_speculative_tokens or 0) <= 3


@ROUNDS
@given(options=st.one_of(OPTIONS, LIKELY))
@example(options={})
@example(options={"num_speculative_tokens": 1 << 40})
@example(options={"model": ["a"]})
def test_any_options(folder: Path, options: dict[str, Any]) -> None:
    check(attempt(folder, folder / "heads", options))


OWN = [*(f.name for f in fields(HeadsConfig)), *(f.name for f in fields(TargetFingerprint)), "x"]


@ROUNDS
@given(
    changes=st.dictionaries(st.sampled_from(OWN), VALUES, max_size=3),
    removed=st.sets(st.sampled_from(OWN), max_size=2),
    inside=st.booleans(),
)
def test_any_heads_config(
    folder: Path, changes: dict[str, Any], removed: set[str], inside: bool
) -> None:
    """Fields of config.json replaced, added or taken away, at the top or inside `target`."""
    heads = folder / "changed"
    shutil.copytree(folder / "heads", heads, dirs_exist_ok=True)
    config = json.loads((folder / "heads" / "config.json").read_text(encoding="utf-8"))
    place = config["target"] if inside else config
    place.update(changes)
    for name in removed:
        place.pop(name, None)
    (heads / "config.json").write_text(json.dumps(config), encoding="utf-8")
    check(attempt(folder, heads, {}))


def test_the_fields_drawn_from_are_there() -> None:
    assert asdict(heads_config()).keys() <= set(OWN)
    assert "num_speculative_tokens" in ASKED
