"""A model whose parts lie apart gives what it gives on one device.

Nothing here has two devices that compute. On a CPU accelerate keeps parts on disk, and fetches
them for each pass by the same hooks that move states between GPUs: their weights are on `meta`,
so whatever takes a weight's device for that of the ids, or moves the model, fails.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from heads_training import placement, target
from heads_training.engines import EngineOptions, Request, TransformersEngine
from heads_training.finetune import make_objective
from heads_training.hidden_states import hidden_states, read_shard, write_states
from heads_training.placement import (
    choose_map,
    input_device,
    is_spread,
    needs_several,
    weight_bytes,
)
from heads_training.records import Record
from heads_training.target import check_last_hidden_state, load_causal_lm
from heads_training.train import TrainingData, new_heads
from tests.heads_training.made_data import TINY

GB = 10**9
# The embedding or the last parts are elsewhere: what goes in and what comes out.
APART = {
    "first": {"model.embed_tokens": "disk", "model.layers.0": "disk"},
    "last": {"model.layers.1": "disk", "model.norm": "disk", "lm_head": "disk"},
}


def parts(elsewhere: dict[str, str]) -> dict[str, str | int]:
    """A place for each part of the tiny target."""
    names = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    all_names = [*(f"model.{name}" for name in names), "lm_head"]
    return {name: elsewhere.get(name, "cpu") for name in all_names}


@pytest.mark.parametrize("where", APART)
def test_states_of_a_spread_model(
    where: str, tiny_target: Path, tiny_records: list[Record]
) -> None:
    whole = load_causal_lm(tiny_target, torch.bfloat16, "cpu")
    spread = load_causal_lm(tiny_target, torch.bfloat16, device_map=parts(APART[where]))
    devices = {weight.device.type for weight in spread.parameters()}
    assert devices == {"cpu", "meta"}
    assert input_device(spread) == torch.device("cpu")
    check_last_hidden_state(spread)
    assert torch.equal(hidden_states(spread, tiny_records), hidden_states(whole, tiny_records))


def test_the_pipeline_spreads_what_one_gpu_does_not_hold(
    tiny_target: Path,
    tiny_answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """States written to disk, and text by transformers, by a model that is spread unasked."""
    expected = write_states(str(tiny_target), tiny_answers, tmp_path / "whole")
    options = EngineOptions(tiny_target, "float32", 64, 4, ())
    requests = [Request([5, 6, 7], 8), Request([9, 4], 8)]
    texts = TransformersEngine(options).complete(requests)
    asked = []

    def choose(folder: Path, dtype: str | torch.dtype) -> dict[str, str | int]:
        asked.append((folder, dtype))
        return parts(APART["last"])

    monkeypatch.setattr(target, "choose_map", choose)
    caplog.set_level(logging.INFO)
    found = write_states(str(tiny_target), tiny_answers, tmp_path / "spread")
    for ours, path in zip(found, expected, strict=True):
        assert torch.equal(read_shard(ours).hidden_TD, read_shard(path).hidden_TD)
    assert TransformersEngine(options).complete(requests) == texts
    assert caplog.text.count(f"{tiny_target.name}: spread over cpu, disk") == 2
    assert asked == [(tiny_target, torch.bfloat16), (tiny_target, "float32")]


def test_a_device_that_is_named_is_the_only_one(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finetune names it: accelerate's DDP and FSDP want whole models."""
    monkeypatch.setattr(target, "choose_map", lambda *_: parts(APART["first"]))
    model = load_causal_lm(tiny_target, "auto", "cpu")
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


def test_finetune_spreads_nothing(tiny_data: TrainingData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "choose_map", lambda *_: pytest.fail("it was to be spread"))
    config = replace(TINY, mode="finetune", tuned_target=Path("new"))
    base = make_objective(config, tiny_data, new_heads(TINY, tiny_data)).base
    assert not is_spread(base)


@pytest.mark.parametrize(
    ("weights", "free", "expected"),
    [
        (141 * GB, [80 * GB] * 8, True),
        (70 * GB, [80 * GB] * 2, True),  # nothing would be left for activations
        (16 * GB, [80 * GB] * 8, False),  # one is enough
        (141 * GB, [80 * GB], False),  # there is no other
        (141 * GB, [], False),
    ],
)
def test_several_gpus_where_one_is_too_small(weights: int, free: list[int], expected: bool) -> None:
    assert needs_several(weights, free) is expected


def test_the_map_follows_free_memory(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = (tiny_target / "model.safetensors").stat().st_size
    assert weight_bytes(tiny_target, torch.bfloat16) == weight_bytes(tiny_target, "auto") == stored
    assert weight_bytes(tiny_target, torch.float32) == 2 * stored
    assert choose_map(tiny_target, "auto") is None or torch.cuda.device_count() > 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (stored * 3 // 2, 0))
    assert choose_map(tiny_target, torch.bfloat16) is None
    assert choose_map(tiny_target, torch.float32) == "auto"


def test_what_no_gpu_holds_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = SimpleNamespace(hf_device_map={"a": 0, "b": 1, "c": "cpu", "d": "disk"})
    with caplog.at_level(logging.INFO):
        placement.report(model, Path("large"))
    assert "large: spread over 0, 1, cpu, disk" in caplog.text
    assert "found 2 of 4 parts that no GPU here holds" in caplog.text
