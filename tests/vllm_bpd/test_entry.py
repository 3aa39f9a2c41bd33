"""Every way to say `bpd` on a command line, in Python and in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest

pytest.importorskip("vllm", reason="these are vLLM's ways in")

from pydantic import ValidationError
from transformers import AutoConfig
from vllm import AsyncEngineArgs, EngineArgs, ModelRegistry
from vllm.config import SpeculativeConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_bpd
from tests.vllm_bpd.samples import one_line, write_heads, write_target
from vllm_bpd import entry
from vllm_bpd import speculative as speculative_module
from vllm_bpd.config import ARCHITECTURE, BpdConfig
from vllm_bpd.discovery import HEADS_FOLDER, find_heads
from vllm_bpd.errors import HeadsError
from vllm_bpd.speculative import BpdSpeculativeConfig

COMMON = {"skip_tokenizer_init": True, "enforce_eager": True}


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    vllm_bpd.register()


@pytest.fixture(scope="module")
def parser() -> Any:
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with three heads inside."""
    folder = write_target(tmp_path_factory.mktemp("entry") / "target")
    write_heads(folder / HEADS_FOLDER, folder)
    return folder


WAYS = {
    "bare word": (["--speculative-config", "bpd"], {}),
    "bare word, one argument": (["--speculative-config=bpd"], {}),
    "underscores": (["--speculative_config", "bpd"], {}),
    "short": (["-sc", "bpd"], {}),
    "json": (['--speculative-config={"method": "bpd"}'], {}),
    "json with more": (
        ["-sc", '{"method": "bpd", "num_speculative_tokens": 2}'],
        {"num_speculative_tokens": 2},
    ),
    "dotted": (["--speculative-config.method", "bpd"], {}),
    "dotted with more": (
        ["--speculative-config.method=bpd", "--speculative-config.num_speculative_tokens", "2"],
        {"num_speculative_tokens": 2},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_command_line_takes_the_method(parser: Any, way: str) -> None:
    arguments, more = WAYS[way]
    assert parser.parse_args(arguments).speculative_config == {"method": "bpd", **more}


@pytest.mark.parametrize(
    "text",
    [
        "speculative-config: bpd\n",
        "speculative-config:\n  method: bpd\n",
        "speculative-config:\n  method: bpd\n  num_speculative_tokens: 2\n",
        "spec-method: bpd\n",
    ],
)
def test_a_config_file_takes_the_method(
    parser: Any, target: Path, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: {target}\nskip-tokenizer-init: true\nenforce-eager: true\n{text}")
    parsed = parser.parse_args(["--config", str(file)])
    made = EngineArgs.from_cli_args(parsed).create_engine_config().speculative_config
    assert isinstance(made, BpdSpeculativeConfig)
    assert made.num_speculative_tokens == (2 if "2" in text else 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--spec-method", "bpd"],
        ["--spec-method", "bpd", "--spec-tokens", "2"],
        ["--spec-method", "bpd", "--spec-model", "HEADS"],
        ["--speculative-config", "bpd", "--spec-tokens", "2"],
        ["--speculative-config", "bpd"],
    ],
    ids=" ".join,
)
def test_the_command_line_serves(parser: Any, target: Path, arguments: list[str]) -> None:
    named = [str(target / HEADS_FOLDER) if word == "HEADS" else word for word in arguments]
    rest = ["--model", str(target), "--skip-tokenizer-init", "--enforce-eager"]
    parsed = parser.parse_args([*rest, *named])
    made = EngineArgs.from_cli_args(parsed).create_engine_config().speculative_config
    assert isinstance(made, BpdSpeculativeConfig)
    assert made.num_speculative_tokens == (2 if "2" in arguments else 3)
    assert made.model == str(target / HEADS_FOLDER)


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
@pytest.mark.parametrize("speculative", ["bpd", {"method": "bpd"}], ids=["word", "dict"])
def test_python_serves(target: Path, kind: Any, speculative: Any) -> None:
    arguments = kind(model=str(target), speculative_config=speculative, **COMMON)
    assert isinstance(arguments.create_engine_config().speculative_config, BpdSpeculativeConfig)


def test_the_server_parser_takes_the_word_too() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["-sc", "bpd"]).speculative_config == {"method": "bpd"}


def test_what_is_neither_word_nor_json_is_refused_as_before(
    parser: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["-sc", "bdp"], ["--spec-method", "bdp"]):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(arguments)
        assert caught.value.code == 2
        assert "bdp" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["None", ""])
def test_no_speculation_can_still_be_said(parser: Any, text: str) -> None:
    assert parser.parse_args(["-sc", text]).speculative_config is None


def test_help_shows_the_word(parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", "spec")
    shown = " ".join(parser.format_help().split())
    assert "The bare word `bpd` serves blockwise heads (vllm-bpd)" in shown
    assert ",bpd}" in shown
    assert "ngram" in shown


@pytest.fixture
def nowhere(target: Path) -> Any:
    return EngineArgs(
        model=str(target), speculative_config={"method": "bpd", "model": "/nowhere"}, **COMMON
    )


def test_a_mistake_in_python_is_an_exception(nowhere: Any) -> None:
    with pytest.raises(HeadsError, match=r"^model: '/nowhere' is neither") as caught:
        nowhere.create_engine_config()
    one_line(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", "x"),
        ("modle", "/heads"),
        ("model", 3),
        ("num_speculative_tokens_per_batch_size", "x"),
    ],
)
def test_what_pydantic_refuses_is_one_line_too(target: Path, name: str, value: Any) -> None:
    arguments = EngineArgs(
        model=str(target), speculative_config={"method": "bpd", name: value}, **COMMON
    )
    with pytest.raises(HeadsError) as caught:
        arguments.create_engine_config()
    assert one_line(caught.value).startswith(f"{name}: found {value!r}; ")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("context_window", 2**64, "18446744073709551616"),
        ("min_confidence", 10**400, "1000"),
        ("x\ny", 1, "1"),
    ],
)
def test_nasty_names_and_values_stay_one_short_line(
    target: Path, name: str, value: Any, shown: str
) -> None:
    arguments = EngineArgs(
        model=str(target), speculative_config={"method": "bpd", name: value}, **COMMON
    )
    with pytest.raises(HeadsError) as caught:
        arguments.create_engine_config()
    message = one_line(caught.value)
    assert message.startswith(f"{name if name.isprintable() else repr(name)}: found {shown}")
    assert len(message) < 400


def test_a_mistake_that_vllm_finds_in_several_fields_is_one_line(target: Path) -> None:
    speculative = {"method": "bpd", "synthetic_acceptance_length": 2.5}
    with pytest.raises(HeadsError) as caught:
        EngineArgs(
            model=str(target), speculative_config=speculative, **COMMON
        ).create_engine_config()
    message = one_line(caught.value)
    assert message.startswith("speculative_config: synthetic_acceptance_rates / synthetic_acc")
    assert message.endswith("; correct it or leave it out")


def test_weights_are_looked_for_in_the_engines_download_dir(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return find_heads(*arguments)

    monkeypatch.setattr(speculative_module, "find_heads", find)
    for folder in (str(tmp_path), None):
        EngineArgs(
            model=str(target), speculative_config="bpd", download_dir=folder, **COMMON
        ).create_engine_config()
    assert asked == [str(tmp_path), None]
    assert entry.download_dir.get() is None


def test_mistakes_of_other_methods_stay_vllms_own(target: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": -1}
    arguments = EngineArgs(model=str(target), speculative_config=speculative, **COMMON)
    with pytest.raises(ValidationError):
        arguments.create_engine_config()


@pytest.mark.parametrize("program", ["/venv/bin/vllm", "/x/vllm/entrypoints/cli/main.py"])
def test_a_mistake_on_the_command_line_is_one_line(
    nowhere: Any, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "serve"])
    with pytest.raises(SystemExit) as caught:
        nowhere.create_engine_config()
    assert isinstance(caught.value.code, str)  # printed to stderr, status 1
    assert one_line(caught.value).startswith("vllm: error: model: '/nowhere' is neither")
    assert caught.value.__suppress_context__


def test_other_methods_are_left_alone(target: Path, parser: Any) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    parsed = parser.parse_args(["-sc", json.dumps(ngram)])
    assert parsed.speculative_config == ngram
    made = EngineArgs(model=str(target), speculative_config=ngram, **COMMON)
    assert type(made.create_engine_config().speculative_config) is SpeculativeConfig
    plain = EngineArgs(model=str(target), **COMMON).create_engine_config()
    assert plain.speculative_config is None


def test_an_unknown_method_is_refused_as_before(target: Path) -> None:
    made = EngineArgs(
        model=str(target),
        speculative_config={"method": "bdp", "num_speculative_tokens": 1},
        **COMMON,
    )
    with pytest.raises(ValueError, match="bdp"):
        made.create_engine_config()


def test_refusing_names_reason_and_doctor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry, "_refused", None)
    entry.refuse("the moon is full")
    with pytest.raises(HeadsError, match="speculative method bpd: the moon is full; `vllm-bpd"):
        SpeculativeConfig(method="bpd")
    assert "the moon is full" in caplog.text


def test_our_method_may_use_async_scheduling() -> None:
    assert get_args(entry.async_methods(Literal["a", "b"])) == ("a", "b", "bpd")


def vllm_config(method: str | None, v2: bool, asked: bool | None) -> Any:
    return SimpleNamespace(
        speculative_config=None if method is None else SimpleNamespace(method=method),
        scheduler_config=SimpleNamespace(async_scheduling=asked),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize(
    ("method", "v2", "asked", "found"),
    [
        ("bpd", False, None, False),
        ("bpd", False, False, False),
        ("bpd", True, None, None),
        ("bpd", True, True, True),
        ("bpd", True, False, False),
        ("ngram", False, None, None),
        ("eagle", False, True, True),
        (None, False, True, True),
    ],
)
def test_only_v1_with_our_method_loses_async_scheduling(
    method: str | None, v2: bool, asked: bool | None, found: bool | None
) -> None:
    seen = []
    made = vllm_config(method, v2, asked)
    entry.check_vllm_config(lambda c: seen.append(c.scheduler_config.async_scheduling), made)
    assert seen == [found]  # before the engine decides


def test_v1_with_our_method_refuses_async_scheduling() -> None:
    with pytest.raises(HeadsError, match=r"^async_scheduling: found True; bpd on") as caught:
        entry.check_vllm_config(lambda _: None, vllm_config("bpd", False, True))
    one_line(caught.value)


def test_ours_is_no_unknown_method_to_v2() -> None:
    """0.29 asks which features V2 lacks, and takes our method for one."""

    def lacking(config: Any) -> list[str]:
        return ["dual batch overlap", f"speculative method '{config.speculative_config.method}'"]

    ours = entry.v2_unsupported_features(lacking, vllm_config("bpd", True, None))
    others = entry.v2_unsupported_features(lacking, vllm_config("medusa", True, None))
    assert ours == ["dual batch overlap"]
    assert others == ["dual batch overlap", "speculative method 'medusa'"]


@pytest.mark.parametrize(
    ("method", "v2", "schedule", "refused"),
    [
        ("bpd", True, [[1, 4, 2]], True),
        ("bpd", True, None, False),
        ("bpd", False, [[1, 4, 2]], False),
        ("eagle", True, [[1, 4, 2]], False),
        (None, True, None, False),
    ],
)
def test_a_schedule_that_v2_would_ignore_is_refused(
    method: str | None, v2: bool, schedule: Any, refused: bool
) -> None:
    passed: list[Any] = []
    made = vllm_config(method, v2, None)
    if method is not None:
        made.speculative_config.num_speculative_tokens_per_batch_size = schedule
    if refused:
        with pytest.raises(
            HeadsError, match=r"^num_speculative_tokens_per_batch_size: f"
        ) as caught:
            entry.refuse_dynamic_schedule_on_v2(passed.append, made)
        one_line(caught.value)
    else:
        entry.refuse_dynamic_schedule_on_v2(passed.append, made)
    assert passed == ([] if refused else [made])


def test_the_format_is_registered_once_and_again() -> None:
    vllm_bpd.register()
    assert ARCHITECTURE in ModelRegistry.get_supported_archs()
    assert type(AutoConfig.for_model("bpd")) is BpdConfig
