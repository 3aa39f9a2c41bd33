"""Answers on disk, end to end with transformers as the engine: a tiny target, no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_training import generate as module
from heads_training.answers_folder import SETTINGS_FILE, SUMMARY_FILE
from heads_training.chat import load_tokenizer, prompt_ids, stop_token_ids
from heads_training.conversation import to_records
from heads_training.engines import Completion, EngineOptions, Request, TransformersEngine
from heads_training.generate import GenerateConfig, generate
from heads_training.prompts import read_conversations
from heads_training.records import Record, answer_files, chunk_paths, read_records
from tests.heads_training.tiny_chat import write_chat_target
from vllm_bpd.errors import HeadsError

LOOP = [40, 41] * 30


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Who is captain number {i}?"},
                {"role": "assistant", "content": f"The captain {'x' * (i // 4)} is new."},
            ]
        }
        for i in range(7)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make(chat_target: Path, tmp_path: Path, prompts: Path, **changes: Any) -> GenerateConfig:
    values: dict[str, Any] = {
        "prompts": (prompts,),
        "self_written": 0,
        "engine": "transformers",
        "answer_tokens": 6,
        "chunk": 3,
        "max_model_len": 512,
        "dtype": "float32",
    }
    return GenerateConfig(str(chat_target), tmp_path / "answers", **{**values, **changes})


def all_records(config: GenerateConfig) -> list[Record]:
    return [r for path in answer_files(config.output) for r in read_records(path)]


def summary(config: GenerateConfig) -> dict[str, int]:
    values: dict[str, int] = json.loads((config.output / SUMMARY_FILE).read_text())
    return values


def test_answers_are_the_targets_own(chat_target: Path, tmp_path: Path, prompts: Path) -> None:
    config = make(chat_target, tmp_path, prompts)
    written = generate(config)
    assert [path.name for path in chunk_paths(config.output)] == [
        f"answers-0000{i}.jsonl" for i in range(3)
    ]
    records = all_records(config)
    tokenizer = load_tokenizer(chat_target)
    asked = [
        prompt_ids(tokenizer, conversation.messages[:1])
        for conversation in read_conversations(prompts)
    ]
    assert sorted(r.prompt_token_ids for r in records) == sorted(asked)
    stop_ids = stop_token_ids(chat_target, tokenizer)
    engine = TransformersEngine(EngineOptions(chat_target, "float32", 512, 1, stop_ids))
    for record in records:
        (alone,) = engine.complete([Request(record.prompt_token_ids, 6)])
        assert (record.answer_token_ids, record.finish_reason) == (
            alone.token_ids, alone.finish_reason,
        )  # fmt: skip
    assert (
        written == sum(len(r.answer_token_ids) for r in records) == summary(config)["answer_tokens"]
    )
    assert {r.source for r in records} == {"mine"}
    assert not list(config.output.glob("*.partial*"))


def test_an_interrupted_run_goes_on(
    chat_target: Path, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(chat_target, tmp_path, prompts, self_written=4, second_turns=1.0)
    write = module._ChunkMaker.write

    def interrupted(self: Any, number: int, planned: Any, path: Path) -> None:
        if number == 2:
            raise KeyboardInterrupt
        write(self, number, planned, path)

    monkeypatch.setattr(module._ChunkMaker, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(config)
    monkeypatch.undo()
    half = {path: path.read_bytes() for path in chunk_paths(config.output)}
    assert len(half) == 2
    assert generate(config) > 0
    assert {path: path.read_bytes() for path in half} == half
    whole = replace(config, output=tmp_path / "at-once")
    generate(whole)
    assert all_records(config) == all_records(whole)
    assert summary(config) == summary(whole)

    def no_engine(*_: Any) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(module, "open_engine", no_engine)
    assert generate(config) == 0
    shares = [
        generate(replace(config, worker=worker, workers=2)) for worker in range(2)
    ]  # nothing is left for them either
    assert shares == [0, 0]


class Said:
    """An engine whose answers are written down; it ends every text that is not an answer."""

    def __init__(self, answers: list[Completion]) -> None:
        self.answers = answers

    def complete(self, requests: Any) -> list[Completion]:
        assert requests, "nothing is asked for"
        return [
            self.answers.pop(0) if request.temperature == 0 else Completion([50] * 60, "stop")
            for request in requests
        ]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 3), ({"drop_loops": True}, 2), ({"drop_cut": True}, 1)],
)
def test_degenerate_answers(
    chat_target: Path,
    tmp_path: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, bool],
    kept: int,
) -> None:
    prompts.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(4)))
    said = [
        Completion(LOOP, "length"),
        Completion([60, 61], "length"),
        Completion([62, 63], "stop"),
        Completion([], "stop"),
    ]
    monkeypatch.setattr(module, "open_engine", lambda *_: Said(said))
    config = make(chat_target, tmp_path, prompts, chunk=4, answer_tokens=60, **options)
    with caplog.at_level("INFO"):
        generate(config)
    records = all_records(config)
    assert len(records) == kept
    counts = summary(config)
    assert {n: counts[n] for n in ("answers", "loop", "cut", "empty")} == {
        "answers": 4, "loop": 1, "cut": 1, "empty": 1,
    }  # fmt: skip
    assert counts["dropped"] == 4 - kept
    assert counts["answer_tokens"] == sum(len(r.answer_token_ids) for r in records)
    assert "4 answers" in caplog.text
    assert "1 (25.0%) end in a loop; 1 (25.0%) are cut off" in caplog.text


def test_second_turns_follow_answers_that_ended(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [Completion([70 + i], "stop" if i % 2 else "length") for i in range(12)]
    monkeypatch.setattr(module, "open_engine", lambda *_: Said(said))
    config = GenerateConfig(
        str(chat_target), tmp_path, self_written=8, passages=0.5, second_turns=1.0,
        answer_tokens=6, max_model_len=2000,
    )  # fmt: skip
    generate(config)
    records = all_records(config)
    assert len(records) == 12
    second = [r for r in records if r.source.startswith("second-")]
    assert len(second) == 4
    assert sum(r.source.startswith("passages:") for r in records) == 4
    firsts = [r for r in records if r.finish_reason == "stop" and r not in second]
    for record in second:
        assert any(
            record.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
            and record.prompt_token_ids[len(first.prompt_token_ids)] == first.answer_token_ids[0]
            for first in firsts
        )


def test_given_answers_need_no_engine(
    chat_target: Path, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "open_engine", lambda *_: pytest.fail("an engine was opened"))
    config = make(chat_target, tmp_path, prompts, answers_from="given")
    generate(config)
    tokenizer = load_tokenizer(chat_target)
    stop_ids = stop_token_ids(chat_target, tokenizer)
    expected = [
        record
        for conversation in read_conversations(prompts)
        for record in to_records(conversation, tokenizer, stop_ids)
    ]
    key = lambda record: record.prompt_token_ids  # noqa: E731
    assert sorted(all_records(config), key=key) == sorted(expected, key=key)
    longest = max(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in expected)
    short = replace(config, output=tmp_path / "short", answer_tokens=1, max_model_len=longest - 1)
    generate(short)
    left = len(expected) - len(all_records(short))
    assert left == 3
    assert summary(short)["too_long"] == left


def test_other_settings_do_not_mix_with_answers(
    chat_target: Path, tmp_path: Path, prompts: Path
) -> None:
    config = make(chat_target, tmp_path, prompts, answers_from="given")
    generate(config)
    text = (config.output / SETTINGS_FILE).read_text()
    assert str(tmp_path) not in text  # names, no paths
    with pytest.raises(HeadsError, match=r"generate.json: seed: found 0, this run has 1; give"):
        generate(replace(config, seed=1))
    # What says how the work is shared may change; so may the place of the target.
    moved = write_chat_target(tmp_path / "moved")
    assert generate(replace(config, workers=2, engine="auto", target=str(moved))) == 0
    other = write_chat_target(tmp_path / "chat-target", seed=1)
    with pytest.raises(HeadsError, match="target_fingerprint: found"):
        generate(replace(config, target=str(other)))
    prompts.write_text(prompts.read_text().replace("new", "old"))
    with pytest.raises(HeadsError, match="prompts: found"):
        generate(config)
    (config.output / SETTINGS_FILE).write_text("[")
    with pytest.raises(HeadsError, match="not readable"):
        generate(config)
    (config.output / SETTINGS_FILE).unlink()
    with pytest.raises(HeadsError, match="missing beside answers"):
        generate(config)


def test_fine_tuning_is_seen_where_the_lm_head_stayed(
    chat_target: Path, tmp_path: Path, prompts: Path
) -> None:
    from transformers import LlamaForCausalLM

    config = make(chat_target, tmp_path, prompts, answers_from="given")
    generate(config)
    tuned = write_chat_target(tmp_path / "tuned")
    model = LlamaForCausalLM.from_pretrained(tuned)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tuned)
    with pytest.raises(HeadsError, match="target_fingerprint"):
        generate(replace(config, target=str(tuned)))


def test_a_teacher_answers(chat_target: Path, tmp_path: Path, prompts: Path) -> None:
    teacher = write_chat_target(tmp_path / "teacher", seed=3)
    own = make(chat_target, tmp_path, prompts)
    taught = replace(own, teacher=str(teacher), output=tmp_path / "taught")
    alone = replace(own, target=str(teacher), output=tmp_path / "alone")
    for config in (own, taught, alone):
        generate(config)
    assert all_records(taught) == all_records(alone) != all_records(own)
    settings = json.loads((taught.output / SETTINGS_FILE).read_text())
    assert settings["teacher"] == "teacher"
    assert settings["teacher_fingerprint"] != settings["target_fingerprint"]
    beams = replace(taught, beams=4, output=tmp_path / "beams")
    generate(beams)
    assert all_records(beams) != all_records(taught)
    stranger = write_chat_target(tmp_path / "stranger", family="headers")
    with pytest.raises(HeadsError, match=r"teacher: .*stranger: its vocabulary is not"):
        generate(replace(own, teacher=str(stranger), output=tmp_path / "never"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beams": 2, "temperature": 0.5}, "beams: found 2 at temperature 0.5"),
        ({"beams": 0}, "beams: found 0"),
        ({"top_p": 0.0}, "top_p: found 0.0"),
        ({"temperature": -1.0}, "temperature: found -1.0"),
        ({"passages": 1.5}, "passages: found 1.5"),
        ({"second_turns": -0.1}, "second_turns: found -0.1"),
        ({"engines": 0}, "engines: found 0"),
        ({"answers_from": "given"}, "answers_from: found given"),
        ({"answers_from": "given", "dataset": "d", "teacher": "m"}, "teacher: found m"),
        ({"dataset_rows": -1}, "dataset_rows: found -1"),
        ({"max_model_len": 256}, "max_model_len: found 256"),
        ({"self_written": 0}, "self_written: found 0"),
    ],
)
def test_impossible_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(HeadsError, match=said):
        GenerateConfig("t", Path("o"), **changes)
