"""Conversations from JSONL files and from data sets; what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from heads_training.prompts import (
    Conversation,
    digest,
    read_conversations,
    read_dataset,
    to_prompt,
)
from vllm_bpd.errors import HeadsError

ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": f"number {i}"} for i in range(6)],
    "messages": [
        {
            "prompt": "not read",
            "messages": [
                {"role": "user", "content": f"number {i}"},
                {"role": "assistant", "content": "x"},
            ],
        }
        for i in range(6)
    ],
    "conversations": [
        {
            "conversations": [
                {"from": "human", "value": f"number {i}"},
                {"from": "gpt", "value": "x"},
            ]
        }
        for i in range(6)
    ],
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def contents(conversations: list[Conversation]) -> list[str]:
    return [to_prompt(conversation).messages[-1]["content"] for conversation in conversations]


def test_three_kinds_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "three"}]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    found = read_conversations(path)
    assert [to_prompt(one).messages for one in found] == [
        ({"role": "user", "content": text},) for text in ("one", "two", "three")
    ]
    assert found[1].messages[1] == {"role": "assistant", "content": "x"}  # kept where it was given
    assert {one.source for one in found} == {"mine"}
    assert [one.where for one in found] == [f"{path}:{line}" for line in (1, 3, 5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no prompts"),
        ("{", "1: not JSON"),
        ('{"text": "a"}', r"found \['text'\]"),
        ("[]", "found list"),
        ('{"prompt": "a"}\n{"messages": [{"role": "assistant", "content": "b"}]}', "2: found no u"),
        ('{"messages": ["b"]}', "found turn 'b'"),
        ('{"messages": [{"role": "user", "content": null}]}', "expected strings `role` and"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(HeadsError, match=said) as caught:
        contents(read_conversations(path))
    assert str(caught.value).startswith(str(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="not readable"):
        read_conversations(tmp_path / "none.jsonl")


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("stored", ["jsonl", "parquet", "folder"])
def test_data_sets_of_three_shapes(tmp_path: Path, kind: str, stored: str) -> None:
    (tmp_path / "set").mkdir()
    if stored == "parquet":
        name = str(tmp_path / "set" / "train.parquet")
        datasets.Dataset.from_list(ROWS[kind]).to_parquet(name)
    else:
        name = write_jsonl(tmp_path / "set" / "train.jsonl", ROWS[kind])
    if stored == "folder":
        name = str(tmp_path / "set")
    found = read_dataset(name)
    assert contents(found) == [f"number {i}" for i in range(6)]
    assert {one.source for one in found} == {"set" if stored == "folder" else "train"}
    answer = () if kind == "prompt" else ({"role": "assistant", "content": "x"},)
    assert found[0].messages[1:] == answer


def test_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", ROWS["prompt"])
    drawn = contents(read_dataset(name, rows=3, seed=1))
    assert drawn == contents(read_dataset(name, rows=3, seed=1))
    assert len(set(drawn)) == 3
    others = {tuple(contents(read_dataset(name, rows=3, seed=seed))) for seed in range(5)}
    assert len(others) > 1
    assert contents(read_dataset(name, split="train[2:4]")) == ["number 2", "number 3"]
    assert contents(read_dataset(name, rows=99)) == [f"number {i}" for i in range(6)]


def test_the_digest_is_of_what_was_read(tmp_path: Path) -> None:
    same = [
        digest(read_dataset(write_jsonl(tmp_path / f"{name}.jsonl", ROWS["messages"])))
        for name in ("a", "b")
    ]
    assert same[0] == same[1]
    other = digest(read_dataset(write_jsonl(tmp_path / "c.jsonl", ROWS["messages"][1:])))
    assert other != same[0]


@pytest.mark.parametrize(
    ("rows", "name", "options", "said"),
    [
        ([{"text": "a"}], "a.jsonl", {}, "found the columns text; expected a string `prompt`"),
        ([{"prompt": "a"}], "a.jsonl", {"split": "test"}, "split test.*cannot be loaded"),
        ([{"prompt": "a"}, {"prompt": None}], "a.jsonl", {}, "train row 1: found"),
        ([{"prompt": "a"}], "a.jsonl", {"split": "train[:0]"}, "train.:0.*corresponds to no data"),
        ([{"prompt": "a"}], "a.txt", {}, "found a .txt file; expected one of .jsonl"),
        ([], "no/such-set", {}, "no/such-set: split train, config None: cannot be loaded"),
    ],
)
def test_bad_data_sets(
    tmp_path: Path, rows: list[dict[str, Any]], name: str, options: dict[str, Any], said: str
) -> None:
    if rows:
        name = write_jsonl(tmp_path / name, rows)
    with pytest.raises(HeadsError, match=said) as caught:
        read_dataset(name, **options)
    assert str(caught.value).startswith("dataset: ")
    assert "\n" not in str(caught.value)
