"""`SpeculativeConfig` for heads with a lattice: what may be drafted, and its own fields."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the config subclasses vLLM's")

from vllm import EngineArgs
from vllm.config import SpeculativeConfig

import vllm_bpd
from tests.vllm_bpd.samples import one_line, write_heads, write_target
from vllm_bpd.errors import HeadsError

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and for it three heads and three with a lattice of eight places, side by side."""
    folder = tmp_path_factory.mktemp("speculative")
    write_target(folder / "target")
    write_heads(folder / "heads", folder / "target")
    write_heads(folder / "lattice", folder / "target", lattice_places=8)
    return folder


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    """Makes the speculative config of the heads without a lattice, as the engine does."""
    vllm_bpd.register()
    whole = EngineArgs(
        model=str(folder / "target"), skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()

    def make(**fields: Any) -> Any:
        common = {
            "method": "bpd",
            "model": str(folder / "heads"),
            "target_model_config": whole.model_config,
            "target_parallel_config": whole.parallel_config,
        }
        return SpeculativeConfig(**common | fields)

    return make


@pytest.fixture(scope="module")
def lattice(make: Make, folder: Path) -> Make:
    """`make` for the heads with a lattice."""
    return lambda **fields: make(**{"model": str(folder / "lattice")} | fields)


def refusal(attempt: Callable[[], Any]) -> str:
    with pytest.raises(HeadsError) as caught:
        attempt()
    return one_line(caught.value)


def test_heads_without_a_lattice_draft_alike_whatever_is_asked_of_one(make: Make) -> None:
    for context_lookup in (True, False):
        assert make(context_lookup=context_lookup).num_speculative_tokens == 3


@pytest.mark.parametrize(("context_lookup", "most"), [(True, 8), (False, 3)])
def test_behind_the_heads_only_context_drafts(
    lattice: Make, folder: Path, context_lookup: bool, most: int
) -> None:
    asked = {"context_lookup": context_lookup}
    assert lattice(**asked).num_speculative_tokens == most
    for count in range(1, most + 1):
        assert lattice(num_speculative_tokens=count, **asked).num_speculative_tokens == count
    places, more = "", "up to 8 with context_lookup: true"
    if context_lookup:
        places, more = " and a lattice of 8 places", "train more"
    assert refusal(lambda: lattice(num_speculative_tokens=most + 1, **asked)) == (
        f"num_speculative_tokens: found {most + 1}; the checkpoint in {folder / 'lattice'} has "
        f"3 heads{places}; give at most {most}, or {more}"
    )


def test_context_is_looked_up_unless_told(lattice: Make) -> None:
    made = lattice()
    assert made.context_lookup is True
    assert (made.context_window, made.min_confidence) == (8192, None)
    assert lattice(context_window=2, min_confidence=0).min_confidence == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_window", 1),
        ("context_window", -3),
        ("context_window", 2.5),
        ("context_window", 2**31),
        ("context_window", 2**64),
        ("heads_up_to_batch_size", 2**31),
        ("min_confidence", float("nan")),
        ("min_confidence", float("inf")),
        ("min_confidence", 1),
        ("min_confidence", -0.1),
        ("min_confidence", "high"),
        ("context_lookup", "sometimes"),
    ],
)
def test_impossible_values_of_the_lattices_fields_are_refused_by_name(
    lattice: Make, field: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"1 validation error for .*\n{field}\n"):
        lattice(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_speculative_tokens": 10**400},
        {"draft_tensor_parallel_size": 10**400},
        {"tensor_parallel_size": 10**400},
        {"num_speculative_tokens_per_batch_size": [(1, 4, 10**400)]},
        {"min_confidence_per_batch_size": [(10**400, 5, 0.1)]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_numbers_beyond_all_bounds_are_refused_in_one_line(
    make: Make, fields: dict[str, Any]
) -> None:
    message = refusal(lambda: make(**fields))
    assert message.startswith(f"{next(iter(fields))}: found ")
    assert len(message) < 500


def test_a_schedule_of_confidences_is_taken_or_refused(lattice: Make) -> None:
    entries = [(1, 4, 0.1), (5, 9, 1.0)]
    assert lattice(min_confidence_per_batch_size=entries).min_confidence_per_batch_size == entries
    message = refusal(lambda: lattice(min_confidence_per_batch_size=[(2, 4, 0.1)]))
    assert message.startswith("min_confidence_per_batch_size: found a range from 2 to 4")


def test_whether_context_is_looked_up_is_logged(
    make: Make, lattice: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm_bpd.speculative"):
        lattice()
        lattice(context_lookup=False)
        make()
    said = [message[: message.index(" (")] for message in caplog.messages]
    assert [text.split(", ")[:3] for text in said] == [
        ["bpd: 8 drafts a step", "3 heads", "context lookup on"],
        ["bpd: 3 drafts a step", "3 heads", "context lookup off"],
        ["bpd: 3 drafts a step", "3 heads", "context lookup off"],
    ]
