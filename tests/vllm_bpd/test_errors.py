"""Files and values that break a parser or a message still give one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_bpd.samples import one_line, write_heads, write_target
from vllm_bpd.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_weights,
    read_config,
    require_replaceable,
)
from vllm_bpd.errors import HeadsError, named, read_json_lines, shown
from vllm_bpd.fingerprint import read_fingerprint

DEEP = "[" * 100_000
HUGE = "1" * 5_000  # more digits than Python makes an integer of
BROKEN = ["{", "\xff", DEEP, HUGE, '{"a": ' * 100_000, f'{{"num_draft_heads": {HUGE}}}']


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def heads(tmp_path: Path, target: Path) -> Path:
    return write_heads(tmp_path / "heads", target)


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: f"{text[:20]}...")
def test_json_that_cannot_be_read_is_one_line(target: Path, heads: Path, text: str) -> None:
    for folder, read, kind in (
        (heads, read_config, "JSON"),
        (target, read_fingerprint, "a target's config"),
    ):
        path = folder / CONFIG_FILE
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(HeadsError) as caught:
            read(folder)
        assert one_line(caught.value).startswith(f"{path}: not readable as {kind} (")
    with pytest.raises(HeadsError, match="found something other than heads"):
        require_replaceable(heads)


@pytest.mark.parametrize("text", [*BROKEN, "[]"], ids=lambda text: f"{text[:20]}...")
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + text.encode("latin-1"))
    with pytest.raises(HeadsError) as caught:
        read_json_lines(path, "a file")
    where = str(path) if text == "\xff" else f"{path}:3"  # UTF-8 is read as a whole
    assert one_line(caught.value).startswith(f"{where}: ")


def test_a_line_ends_where_json_lets_it(tmp_path: Path) -> None:
    """Other line ends that Unicode has may stand in a text as they are."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": "b\u2028c\x85d"}\r\n{"a": "e"}\n', encoding="utf-8", newline="")
    found = read_json_lines(path, "a file")
    assert found == [(f"{path}:1", {"a": "b\u2028c\x85d"}), (f"{path}:2", {"a": "e"})]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: f"{text[:20]}...")
def test_an_index_that_cannot_be_read_gives_no_hash(target: Path, text: str) -> None:
    (target / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert read_fingerprint(target).lm_head_hash is None


@pytest.mark.parametrize(
    "header",
    [
        DEEP,
        '{"a": ' * 100_000,
        f'{{"a": {{"dtype": "F32", "shape": [{HUGE}], "data_offsets": [0, 4]}}}}',
        f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": [0, {HUGE}]}}}}',
        '{"a\\nb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        '{"__metadata__": 3}',
        "\n{\n",
    ],
    ids=lambda text: f"{text[:30]}...",
)
def test_a_header_that_cannot_be_read_is_one_line(target: Path, heads: Path, header: str) -> None:
    """The header is JSON, too, read by safetensors."""
    content = header.encode()
    content = len(content).to_bytes(8, "little") + content + bytes(4)
    (heads / WEIGHTS_FILE).write_bytes(content)
    (target / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(HeadsError) as caught:
        check_weights(heads, read_config(heads))
    assert one_line(caught.value).startswith(f"{heads / WEIGHTS_FILE}: ")
    assert read_fingerprint(target).lm_head_hash is None


def said_of(folder: Path, change: dict[str, Any], read: Callable[[Path], object]) -> str:
    """The one line that `read` says once `change` is made to the config in `folder`."""
    values = json.loads((folder / CONFIG_FILE).read_text()) | change
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    with pytest.raises(HeadsError) as caught:
        read(folder)
    return one_line(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_draft_heads": 10**4000, "head_hidden_size": 10**4000},
            "num_draft_heads: found 1000",
        ),
        ({"num_draft_heads": 2**31}, "num_draft_heads: found 2147483648; expected at most 2147"),
        ({"x\ny": 1}, "'x\\ny': unknown field; expected num_draft_heads"),
        ({"activation": "a\nb" * 1000}, "activation: found 'a\\nba\\n"),
    ],
)
def test_values_that_would_break_a_line_are_cut(
    heads: Path, change: dict[str, Any], said: str
) -> None:
    message = said_of(heads, change, read_config)
    assert message.startswith(f"{heads / CONFIG_FILE}: {said}")
    assert len(message) < 800


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": [1]}, "text_config: found [1]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: found 'LlamaForCausalLM'"),
        ({"architectures": 5}, "architectures: found 5"),
        ({"architectures": [[]]}, "architecture: found []"),
    ],
)
def test_a_targets_config_of_another_shape_is_named(
    target: Path, change: dict[str, Any], said: str
) -> None:
    message = said_of(target, change, read_fingerprint)
    assert message == f"{target / CONFIG_FILE}: {said}; this is no target's config"


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("a\nb", "'a\\nb'"),
        (10**5000, "a value of type int too large to show"),
        ([10**5000], "a value of type list too large to show"),
        ("x" * 300, f"'{'x' * 199}..."),
    ],
    ids=["float", "text", "huge", "huge inside", "long"],
)
def test_a_value_is_shown_short(value: object, text: str) -> None:
    assert shown(value) == text


def test_what_is_nested_too_deeply_is_not_shown() -> None:
    assert shown(nested()) == "a value of type list too large to show"


def test_a_plain_name_stays() -> None:
    assert named("lm_head.weight") == "lm_head.weight"
    assert named("a\nb") == "'a\\nb'"
