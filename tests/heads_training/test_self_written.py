"""Prompts that the target writes itself, with an engine that says what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from heads_training.chat import user_prefix
from heads_training.engines import Completion, Request
from heads_training.passages import LANGUAGES, SUBJECTS, pick_tasks
from heads_training.prompts import Prompt
from heads_training.self_written import (
    OPENERS,
    pick_openers,
    request_seed,
    write_second_turns,
    write_tasks,
    write_user_turns,
)
from tests.heads_training.tiny_chat import FAMILIES, make_tokenizer

TOKENIZER = make_tokenizer(FAMILIES["chatml"])


class Scripted:
    """An engine that answers with `say(prompt's text)`, a stop token behind it."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self.say = say
        self.asked: list[Request] = []

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        said = [self.say(TOKENIZER.decode(r.prompt_ids)) + "<|im_end|>" for r in requests]
        return [Completion(TOKENIZER.encode(text), "stop") for text in said]

    def beam_search(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def test_openers_repeat_for_one_seed() -> None:
    drawn = pick_openers(200, 3)
    assert drawn == pick_openers(200, 3)
    assert drawn != pick_openers(200, 4)
    assert set(drawn) <= {(text, limit) for text, _, limit in OPENERS}


def test_user_turns_stand_behind_the_prefix_and_their_opener() -> None:
    engine = Scripted(lambda _: "is the captain of the ship?")
    openers = [("Who ", 32), ("", 96), ("Explain ", 64)]
    prompts = write_user_turns(engine, TOKENIZER, openers, seed=5)
    assert [p.messages[0]["content"] for p in prompts if p] == [
        "Who is the captain of the ship?",
        "is the captain of the ship?",
        "Explain is the captain of the ship?",
    ]
    assert [p.source for p in prompts if p] == [
        "self-written:Who", "self-written:free", "self-written:Explain",
    ]  # fmt: skip
    assert TOKENIZER.decode(engine.asked[0].prompt_ids) == user_prefix(TOKENIZER) + "Who "
    assert [r.max_tokens for r in engine.asked] == [32, 96, 64]
    assert len({r.seed for r in engine.asked}) == 3
    assert {r.temperature for r in engine.asked} == {1.0}
    assert write_user_turns(Scripted(lambda _: ""), TOKENIZER, openers, 5) == [None] * 3


def test_tasks_repeat_for_one_seed_and_vary() -> None:
    tasks = pick_tasks(300, 3)
    assert tasks == pick_tasks(300, 3)
    assert tasks != pick_tasks(300, 4)
    assert len({task.kind for task in tasks}) == 8
    assert len({(task.template, task.requests) for task in tasks}) > 280
    for task in tasks:
        assert task.template.count("{") == task.template.count("{text}") == 1
        assert not any("{" in request for request in task.requests)
        assert any(subject in request for subject in SUBJECTS for request in task.requests) or (
            task.kind == "code"
        )


def test_a_foreign_passage_and_its_task_name_one_language() -> None:
    tasks = [task for task in pick_tasks(300, 0) if task.kind == "translation-back"]
    named = [
        [language for language in LANGUAGES if language in text]
        for task in tasks
        for text in (task.requests[0], task.template)
    ]
    pairs = list(zip(named[::2], named[1::2], strict=True))
    assert all(len(written) == 1 and asked in ([], written) for written, asked in pairs)
    assert any(asked for _, asked in pairs)


def test_tasks_hold_the_passages_that_were_asked_for() -> None:
    tasks = pick_tasks(60, 1)
    asked: list[str] = []

    def say(prompt: str) -> str:
        asked.append(prompt)
        return f"This is passage number {len(asked)} of those that were written."

    engine = Scripted(say)
    prompts = write_tasks(engine, TOKENIZER, tasks, seed=0)
    assert {r.temperature for r in engine.asked} == {0.7}  # calmer than user turns
    number = 0
    for task, prompt in zip(tasks, prompts, strict=True):
        assert prompt is not None
        assert prompt.source == f"passages:{task.kind}"
        for position, request in enumerate(task.requests, start=1):
            number += 1
            mark = f"[{position}] " if len(task.requests) > 1 else ""
            text = f"{mark}This is passage number {number} of those"
            assert text in prompt.messages[0]["content"]
            assert request in asked[number - 1]
    assert number == len(asked) > 60
    assert write_tasks(Scripted(lambda _: "short"), TOKENIZER, tasks, 0) == [None] * 60


def test_second_turns_keep_the_history() -> None:
    engine = Scripted(lambda _: " And who is the captain? ")
    first = Prompt(({"role": "user", "content": "What is the ship?"},), "mine")
    answer = TOKENIZER.encode("It is the Swan.<|im_end|>")
    (second,) = write_second_turns(engine, TOKENIZER, [(first, answer)], seed=0)
    assert second is not None
    assert [(m["role"], m["content"]) for m in second.messages] == [
        ("user", "What is the ship?"),
        ("assistant", "It is the Swan."),
        ("user", "And who is the captain?"),
    ]
    assert second.source == "second-mine"
    history = second.messages[:2]
    assert TOKENIZER.decode(engine.asked[0].prompt_ids) == user_prefix(TOKENIZER, history)
    assert write_second_turns(Scripted(lambda _: "no"), TOKENIZER, [(first, answer)], 0) == [None]


def test_seeds_do_not_repeat() -> None:
    seeds = {
        request_seed(chunk, stage, i) for chunk in range(9) for stage in "ab" for i in range(99)
    }
    assert len(seeds) == 9 * 2 * 99
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, "a", 2) == request_seed(1, "a", 2)


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_asked_for_nothing(count: int) -> None:
    engine = Scripted(lambda _: "a passage that is long enough to be used as one")
    assert len(write_tasks(engine, TOKENIZER, pick_tasks(count, 0), 0)) == count
    assert bool(engine.asked) is bool(count)
