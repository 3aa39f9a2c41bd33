"""`SpeculativeConfig` for `bpd`: defaults, refusals, and its way to other processes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="the config subclasses vLLM's")

import vllm.config.vllm
from vllm import EngineArgs
from vllm.config import SpeculativeConfig
from vllm.config.utils import replace
from vllm.platforms import current_platform

import vllm_bpd
from tests.vllm_bpd.fresh import run_fresh, unpickled
from tests.vllm_bpd.samples import one_line, write_heads, write_target
from vllm_bpd import speculative
from vllm_bpd.checkpoint import read_config
from vllm_bpd.errors import HeadsError
from vllm_bpd.patching import PatchError
from vllm_bpd.speculative import (
    _OUR_FIELDS,
    HEADS_FORMATS,
    BpdSpeculativeConfig,
    refuse_target,
)

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and three heads for it, side by side."""
    folder = tmp_path_factory.mktemp("speculative")
    write_target(folder / "target")
    write_heads(folder / "heads", folder / "target")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Make:
    """Makes the config of an engine that serves the heads."""
    vllm_bpd.register()

    def make(speculative: dict[str, Any] | None = None, **arguments: Any) -> Any:
        return EngineArgs(
            model=str(folder / "target"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            speculative_config={"method": "bpd", "model": str(folder / "heads")}
            | (speculative or {}),
            **arguments,
        ).create_engine_config()

    return make


@pytest.fixture(scope="module")
def make(engine: Make, folder: Path) -> Make:
    """Makes the speculative config alone, as the engine does, which is quicker."""
    whole = engine()

    def make(**fields: Any) -> Any:
        common = {
            "method": "bpd",
            "model": str(folder / "heads"),
            "target_model_config": whole.model_config,
            "target_parallel_config": whole.parallel_config,
        }
        return SpeculativeConfig(**common | fields)

    return make


def refusal(attempt: Callable[[], Any]) -> str:
    with pytest.raises(HeadsError) as caught:
        attempt()
    return one_line(caught.value)


def test_every_head_drafts_unless_told(make: Make, folder: Path) -> None:
    made = make()
    assert type(made) is BpdSpeculativeConfig
    assert (made.method, made.num_speculative_tokens) == ("bpd", 3)
    assert made.draft_model_config.hf_config.heads == read_config(folder / "heads")
    assert made.draft_model_config.architectures == ["BlockwiseHeadsModel"]
    assert made.draft_model_config.dtype == made.target_model_config.dtype
    assert made.draft_parallel_config.tensor_parallel_size == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_heads_may_draft(make: Make, count: int) -> None:
    made = make(num_speculative_tokens=count)
    assert made.num_speculative_tokens == count
    limit = made.target_model_config.max_model_len
    assert made.draft_model_config.max_model_len == limit + count


def test_more_drafts_than_heads_are_refused(make: Make, folder: Path) -> None:
    assert refusal(lambda: make(num_speculative_tokens=4)) == (
        f"num_speculative_tokens: found 4; the checkpoint in {folder / 'heads'} has 3 heads; give "
        "at most 3, or train more"
    )


@pytest.mark.parametrize("count", [0, -1, "many"])
def test_a_number_of_drafts_that_is_none_is_refused(make: Make, count: Any) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        make(num_speculative_tokens=count)


# Fields of other methods whose default is None, with a value that vLLM would take.
FOREIGN = {
    "tensor_parallel_size": 1,
    "quantization": "fp8",
    "moe_backend": "triton",
    "attention_backend": "FLASH_ATTN",
    "kv_cache_dtype": "fp8",
    "max_model_len": 32,
    "code_revision": "main",
    "index_share_for_mtp_iteration": True,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "dspark_draft_topk": 3,
    "draft_sample_method": "probabilistic",
}


def another(field: Any) -> Any:
    """A value of this field that is not its default."""
    if field.name in FOREIGN:
        return FOREIGN[field.name]
    default = field.default
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int | float), f"{field.name}: a new field of vLLM; add it here"
    return default / 2 if isinstance(default, float) else default + 1


@pytest.mark.parametrize(
    "field",
    [f for f in dataclasses.fields(SpeculativeConfig) if f.name not in _OUR_FIELDS],
    ids=lambda field: field.name,
)
def test_fields_of_other_methods_are_refused_by_name(make: Make, field: Any) -> None:
    message = refusal(lambda: make(**{field.name: another(field)}))
    assert message.startswith(f"{field.name}: found ")
    assert message.endswith("it has no meaning for method bpd; leave it out")


def test_our_fields_are_fields_and_no_others_are_ours() -> None:
    assert not _OUR_FIELDS & set(FOREIGN)
    assert {f.name for f in dataclasses.fields(SpeculativeConfig)} >= _OUR_FIELDS


@pytest.mark.parametrize(
    "found", ["pt", "npcache", "mistral", "tensorizer", "sharded_state", "gguf", "x" * 999]
)
def test_heads_are_loaded_from_safetensors_only(make: Make, found: str) -> None:
    message = refusal(lambda: make(draft_load_config={"load_format": found}))
    assert message.startswith(f"draft_load_config: found load_format '{found[:100]}")
    assert "heads are loaded from safetensors only: expected auto, safetensors, " in message


@pytest.mark.parametrize("found", HEADS_FORMATS)
def test_loaders_of_safetensors_are_taken(make: Make, found: str) -> None:
    assert make(draft_load_config={"load_format": found}).draft_load_config.load_format == found


def test_an_unknown_field_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="heads_folder"):
        make(heads_folder="x")


@pytest.mark.parametrize(
    "fields",
    [
        {"enforce_eager": True},
        {"revision": "main"},
        {"draft_tensor_parallel_size": 1},
        {"rejection_sample_method": "block"},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5, 0.1]},
        {"num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 64, 1)]},
    ],
    ids=str,
)
def test_fields_that_mean_something_are_taken(make: Make, fields: dict[str, Any]) -> None:
    made = make(**fields)
    for name, value in fields.items():
        if name != "synthetic_acceptance_length":  # vLLM turns it into rates
            assert getattr(made, name) == value


def test_a_dynamic_schedule_is_taken_by_the_engine(engine: Make) -> None:
    made = engine({"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 1]]})
    assert made.speculative_config.uses_dynamic_speculative_decoding()


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ([[2, 4, 1]], "The first batch-size range must start at 1"),
        ([[1, 4]], "3-item sequence"),
        ([[1, 4, 4]], "found 4 drafts; num_speculative_tokens is 3; give at most that many"),
    ],
)
def test_a_wrong_dynamic_schedule_is_refused_early(
    make: Make, schedule: list[Any], reason: str
) -> None:
    fields = {"num_speculative_tokens_per_batch_size": schedule}
    try:
        message = refusal(lambda: make(**fields))
    except ValueError as error:  # pydantic's own check of the shape
        message = str(error)
        assert len(schedule[0]) != 3
        return
    assert message.startswith("num_speculative_tokens_per_batch_size: found ")
    assert reason in message


def test_heads_go_with_a_target_on_several_ranks(engine: Make) -> None:
    """vLLM wants attention heads that divide evenly among ranks; ours have none."""
    made = engine(tensor_parallel_size=2, distributed_executor_backend="mp")
    assert made.speculative_config.draft_parallel_config.tensor_parallel_size == 2


def test_another_tensor_parallel_size_than_the_targets_is_refused(make: Make) -> None:
    message = refusal(lambda: make(draft_tensor_parallel_size=2))
    assert message.startswith("draft_tensor_parallel_size: found 2; heads share")


def test_the_target_must_be_known() -> None:
    vllm_bpd.register()
    message = refusal(lambda: SpeculativeConfig(method="bpd", num_speculative_tokens=2))
    assert message.startswith("target_model_config: missing")


def test_heads_of_another_target_are_refused(make: Make, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", {}, hidden_size=32)
    heads = write_heads(tmp_path / "heads", other)
    message = refusal(lambda: make(model=str(heads)))
    assert "hidden_size: the heads were trained for 32, this target has 16" in message


def test_discovery_is_told_both_revisions(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    target = copy.copy(make().target_model_config)
    target.revision, target.hf_token = "of the target", "a token"
    asked = []

    def find(*arguments: Any) -> None:
        asked.append(arguments)
        raise HeadsError("enough")

    monkeypatch.setattr(speculative, "find_heads", find)
    with pytest.raises(HeadsError, match="enough"):
        make(model="me/heads", revision="of the heads", target_model_config=target)
    assert asked == [(target.model, "me/heads", "of the heads", "a token", "of the target", None)]


KINDS = {
    "runner_type": "generate",
    "is_multimodal_model": False,
    "is_encoder_decoder": False,
    "is_hybrid": False,
    "is_attention_free": False,
}


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("runner_type", "pooling", "a pooling model"),
        ("is_multimodal_model", True, "a multimodal model"),
        ("is_encoder_decoder", True, "an encoder-decoder model"),
        ("is_hybrid", True, "a hybrid or state-space model"),
        ("is_attention_free", True, "a hybrid or state-space model"),
    ],
)
def test_kinds_of_targets_that_are_not_tested_are_refused(
    field: str, value: Any, kind: str
) -> None:
    refuse_target(SimpleNamespace(model="m", **KINDS))
    message = refusal(lambda: refuse_target(SimpleNamespace(model="m", **KINDS | {field: value})))
    assert message.startswith(f"model: m is {kind}; bpd serves decoder-only text models")


def test_it_is_shown_as_short_as_others(make: Make, folder: Path) -> None:
    assert repr(make()) == (
        f"SpeculativeConfig(method='bpd', model='{folder / 'heads'}', num_spec_tokens=3)"
    )


@pytest.mark.parametrize(
    "send",
    [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made)), replace],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_a_copy_is_one_of_ours_and_connects_the_runners(
    make: Make, monkeypatch: pytest.MonkeyPatch, send: Callable[[Any], Any]
) -> None:
    made = make(num_speculative_tokens=2, context_window=9, min_confidence=0.3)
    connected = []
    monkeypatch.setattr(speculative, "install_runners", lambda: connected.append(True))
    again = send(made)
    assert connected == [True]
    assert type(again) is BpdSpeculativeConfig
    assert (again.method, again.model, again.num_speculative_tokens) == ("bpd", made.model, 2)
    assert (again.context_window, again.min_confidence) == (9, 0.3)
    assert again.draft_model_config.hf_config.heads == made.draft_model_config.hf_config.heads
    assert again.compute_hash() == made.compute_hash()


def test_a_process_that_receives_one_has_its_runners_connected(
    make: Make, fresh_process: ForkServerContext
) -> None:
    [received] = run_fresh(fresh_process, unpickled, (pickle.dumps(make()),))
    assert received == ("BpdSpeculativeConfig", 3, True)


def test_runners_that_differ_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def install() -> None:
        raise PatchError("vLLM 0.32.0: a.b: expected (c), found (d)")

    monkeypatch.setattr(speculative, "install_runners", install)
    assert refusal(make) == (
        "speculative method bpd: vLLM 0.32.0: a.b: expected (c), found (d); `vllm-bpd doctor` "
        "shows every touched symbol"
    )


@pytest.mark.parametrize("asked", [None, False])
def test_v1_schedules_in_step(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asked: bool | None
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    made = engine(async_scheduling=asked)
    assert not made.use_v2_model_runner
    assert made.scheduler_config.async_scheduling is False


def test_v1_refuses_async_scheduling(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(lambda: engine(async_scheduling=True))
    assert message.startswith("async_scheduling: found True; bpd on model runner V1")
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in message


@pytest.fixture
def v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2 needs Triton, which has nothing to do with how it schedules."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)


def test_v2_takes_async_scheduling(engine: Make, v2: None) -> None:
    """The CPU platform turns it off again, whoever asked."""
    made = engine(async_scheduling=True)
    assert made.use_v2_model_runner
    assert made.scheduler_config.async_scheduling is not current_platform.is_cpu()
    assert "bpd" in get_args(vllm.config.vllm.EagleModelTypes)


def test_v2_refuses_stages_without_async_scheduling(engine: Make, v2: None) -> None:
    """The CPU platform turns it off, whoever asked."""
    if not current_platform.is_cpu():
        pytest.skip("another platform leaves it on")
    message = refusal(lambda: engine(pipeline_parallel_size=2, distributed_executor_backend="mp"))
    assert message == (
        "pipeline_parallel_size: found 2 without async scheduling; bpd serves several stages with "
        "it alone; leave async_scheduling out, or use tensor parallelism"
    )


def test_releases_whose_stages_answer_wrongly_are_refused(
    engine: Make, v2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_bpd.speculative.vllm_version", lambda: "0.31.2")
    message = refusal(lambda: engine(pipeline_parallel_size=2, distributed_executor_backend="mp"))
    assert message.startswith("pipeline_parallel_size: found 2; bpd serves several stages from")
    assert "this is 0.31.2; use tensor parallelism" in message
    assert engine().speculative_config.method == "bpd"  # one stage is served


def test_the_engines_own_choice_of_runner_and_schedule_fit(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    made = engine()
    assert made.use_v2_model_runner or made.scheduler_config.async_scheduling is False
