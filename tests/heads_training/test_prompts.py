"""Prompt files, and the template's user prefix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads_training.prompts import OPENERS, pick_openers, read_prompts, user_prefix
from vllm_bpd.errors import HeadsError


def test_three_kinds_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "three"}]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    prompts = read_prompts(path)
    assert [p.messages for p in prompts] == [
        ({"role": "user", "content": text},) for text in ("one", "two", "three")
    ]
    assert {p.source for p in prompts} == {"mine"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no prompts"),
        ("{", "1: not JSON"),
        ('{"text": "a"}', r"found \['text'\]"),
        ("[]", "found list"),
        ('{"prompt": "a"}\n{"messages": [{"role": "assistant", "content": "b"}]}', "2: found no u"),
        ('{"messages": ["b"]}', "found turn 'b'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(HeadsError, match=said) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="not readable"):
        read_prompts(tmp_path / "none.jsonl")


def test_openers_repeat_for_one_seed() -> None:
    drawn = pick_openers(200, 3)
    assert drawn == pick_openers(200, 3)
    assert drawn != pick_openers(200, 4)
    assert set(drawn) <= {(text, limit) for text, _, limit in OPENERS}


class _Tokenizer:
    chat_template = "made"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<user>{messages[0]['content']}</user>"


def test_user_prefix() -> None:
    assert user_prefix(_Tokenizer()) == "<user>"
    bare = _Tokenizer()
    bare.chat_template = ""
    with pytest.raises(HeadsError, match="chat_template"):
        user_prefix(bare)
