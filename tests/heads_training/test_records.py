"""Answer files: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads_training import records
from heads_training.records import Record
from vllm_bpd.errors import HeadsError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "answers-00000.jsonl"
    written = [Record([1, 2], [3], "stop", "a:b"), Record([4], [5, 6], "length", "c")]
    records.write_records(path, written)
    assert records.read_records(path) == written
    assert records.answer_files(tmp_path) == records.answer_files(path) == [path]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing partial is left


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "found list"),
        ('{"prompt_token_ids": [1]}', "answer_token_ids"),
        ('{"prompt_token_ids": [], "answer_token_ids": [1]}', "at least one token"),
        ('{"prompt_token_ids": [1, -2], "answer_token_ids": [1]}', "prompt_token_ids"),
        ('{"prompt_token_ids": [1], "answer_token_ids": []}', "no answers"),
    ],
)
def test_bad_answer_files(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(HeadsError, match=said) as caught:
        records.read_records(path)
    assert str(path) in str(caught.value)


def test_a_chunk_whose_answers_were_dropped_is_passed_over(tmp_path: Path) -> None:
    records.write_records(tmp_path / "answers-00000.jsonl", [])
    records.write_records(tmp_path / "answers-00001.jsonl", [Record([1], [2], "stop", "a")])
    assert records.answer_files(tmp_path) == [tmp_path / "answers-00001.jsonl"]


def test_no_answers(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="found no answer file"):
        records.answer_files(tmp_path)
