"""Labels, splits and the draft vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads_training import dataset
from heads_training.hidden_states import write_states
from heads_training.records import Record
from vllm_bpd.errors import HeadsError


def test_labels_of_one_text() -> None:
    sampled_T, next_TK = dataset.label_text(torch.tensor([7, 8]), torch.tensor([10, 11, 12, 13]), 3)
    ignored = dataset.IGNORED
    assert sampled_T.tolist() == [10, 11, 12, 13]
    assert next_TK.tolist() == [
        [11, 12, 13],
        [12, 13, ignored],
        [13, ignored, ignored],
        [ignored, ignored, ignored],
    ]


def test_texts_gather_across_shards(
    tiny_target: Path, tiny_answers: Path, tiny_records: list[Record], tmp_path: Path
) -> None:
    texts = dataset.read_texts(write_states(str(tiny_target), tiny_answers, tmp_path), 2)
    assert texts.sampled_T.tolist() == [i for r in tiny_records for i in r.answer_token_ids]
    assert texts.record_T.tolist() == [
        n for n, r in enumerate(tiny_records) for _ in r.answer_token_ids
    ]
    whole_TD = torch.cat(texts.hidden_TD)
    rows = torch.tensor([texts.rows - 1, 0, 5, texts.rows - 2, 0])
    assert torch.equal(texts.gather(rows), whole_TD[rows])


def test_split_is_by_prompt(tiny_target: Path, tiny_answers: Path, tmp_path: Path) -> None:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path)
    texts = dataset.read_texts(shards + shards, 2)  # every prompt twice
    train_T, held_out_T = dataset.split_rows(texts, 0.4)
    assert sorted(train_T.tolist() + held_out_T.tolist()) == list(range(texts.rows))
    sides = [{texts.prompts[r] for r in texts.record_T[t].tolist()} for t in (train_T, held_out_T)]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_prompts_are_trained_on_unless_their_answer_is_held_out(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    plain = dataset.read_texts(write_states(str(tiny_target), tiny_answers, tmp_path / "a"), 2)
    shards = write_states(str(tiny_target), tiny_answers, tmp_path / "b", True)
    texts = dataset.read_texts(shards, 2)
    assert texts.answers == plain.answers == 12
    assert torch.equal(texts.sampled_T[texts.answer_rows], plain.sampled_T)
    assert texts.digest() == plain.digest()
    train_T, held_out_T = dataset.split_rows(texts, 0.4)
    answers_T = train_T[~texts.of_prompt_R[texts.record_T[train_T]]]
    prompts_T = train_T[texts.of_prompt_R[texts.record_T[train_T]]]
    assert sorted(answers_T.tolist() + held_out_T.tolist()) == texts.answer_rows.tolist()
    assert len(held_out_T) == len(dataset.split_rows(plain, 0.4)[1])
    asked = {texts.prompts[r] for r in texts.record_T[answers_T].tolist()}
    assert {texts.prompts[r] for r in texts.record_T[prompts_T].tolist()} == asked
    counts = dataset.describe(texts)
    assert counts["prompt_tokens"] == texts.rows - plain.rows > 0
    assert {**counts, "prompt_tokens": 0} == dataset.describe(plain)


def test_later_turns_fall_where_the_first_one_does() -> None:
    first, other = [5, 6, 7], [5, 6, 8]
    later, latest = [*first, 9, 9], [*first, 9, 9, 1]
    found = dataset.beginnings([latest, other, first, later, other, [5, 9]])
    assert found[0] == found[2] == found[3]
    assert found[1] == found[4]
    assert len({found[0], found[1], found[5]}) == 3
    assert found[2] == dataset.beginnings([first])[0]  # as without any later turn


def test_draft_vocabulary() -> None:
    sampled = torch.tensor([5, 5, 5, 9, 9, 2, 7])
    assert dataset.draft_vocabulary(sampled, 3, 12).tolist() == [2, 5, 9]  # 2 and 7 tie
    assert dataset.draft_vocabulary(sampled, 6, 12).tolist() == [0, 1, 2, 5, 7, 9]  # filled up
    ids = torch.tensor([2, 5, 9])
    labels = torch.tensor([[5, 7], [9, dataset.IGNORED]])
    assert dataset.to_draft_ids(labels, ids, 12).tolist() == [
        [1, dataset.IGNORED],
        [2, dataset.IGNORED],
    ]
    assert dataset.coverage(sampled, ids) == pytest.approx(6 / 7)


def test_no_shards() -> None:
    with pytest.raises(HeadsError, match="found no shard"):
        dataset.read_texts([], 2)


def test_held_out_answers_are_halved_by_prompt(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    texts = dataset.read_texts(write_states(str(tiny_target), tiny_answers, tmp_path), 2)
    whole_T = dataset.split_rows(texts, 0.8)[1]
    first_T, second_T = dataset.split_held_out(texts, 0.8)
    assert sorted(first_T.tolist() + second_T.tolist()) == whole_T.tolist()
    assert not set(texts.record_T[first_T].tolist()) & set(texts.record_T[second_T].tolist())
    # One answer cannot be halved: it serves for both.
    lone = next(v / 100 for v in range(100) if len(dataset.split_rows(texts, v / 100)[1]))
    both = dataset.split_held_out(texts, lone)
    assert torch.equal(both[0], both[1])
