"""Given conversations: which ids the loss covers, on five families of chat templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from heads_training.conversation import MaskedText, check_mask, to_records
from heads_training.prompts import Conversation
from tests.heads_training.tiny_chat import CHATML, FAMILIES, make_tokenizer
from vllm_bpd.errors import HeadsError

QUESTIONS = ("What is the name of the ship?", "Who is the captain?")
ANSWERS = ("It is called the Swan.", "I think that the captain is new.")
MULTI_TURN = tuple(
    {"role": role, "content": text}
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    for role, text in (("user", question), ("assistant", answer))
)


def given(*messages: dict[str, str]) -> Conversation:
    return Conversation(messages, "src", "data.jsonl:1")


def stops(name: str, tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(FAMILIES[name].stop)]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_answer_is_a_record(name: str) -> None:
    tokenizer = make_tokenizer(FAMILIES[name])
    records = to_records(given(*MULTI_TURN), tokenizer, stops(name, tokenizer))
    assert len(records) == 2
    for turn, record in enumerate(records):
        text = tokenizer.decode(record.answer_token_ids)
        assert text.strip() == ANSWERS[turn] + FAMILIES[name].stop
        # What stands before is what the server would be asked with.
        served = tokenizer.apply_chat_template(
            list(MULTI_TURN[: 2 * turn + 1]), add_generation_prompt=True, return_dict=False
        )
        assert record.prompt_token_ids == served
        assert (record.finish_reason, record.source) == ("given", "src")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_covers_the_answers_and_nothing_else(name: str) -> None:
    tokenizer = make_tokenizer(FAMILIES[name])
    whole = tokenizer.apply_chat_template(list(MULTI_TURN), return_dict=False)
    mask = [False] * len(whole)
    records = to_records(given(*MULTI_TURN), tokenizer, stops(name, tokenizer))
    for record in records:
        first = len(record.prompt_token_ids)
        end = first + len(record.answer_token_ids)
        assert whole[:end] == record.prompt_token_ids + record.answer_token_ids
        assert not any(mask[first:end])  # each answer is covered once
        mask[first:end] = [True] * (end - first)
    assert sum(answer and not mask[i - 1] for i, answer in enumerate(mask)) == 2
    covered = [token for token, answer in zip(whole, mask, strict=True) if answer]
    assert covered == [token for record in records for token in record.answer_token_ids]
    check_mask(MaskedText(whole, mask), tokenizer, "here")


def test_thinking_is_learned_once_and_then_gone() -> None:
    tokenizer = make_tokenizer(FAMILIES["thinking"])
    thought = dict(MULTI_TURN[1], content="<think>the sea</think>\n" + ANSWERS[0])
    messages = (MULTI_TURN[0], thought, *MULTI_TURN[2:])
    stop_ids = stops("thinking", tokenizer)
    first, second = to_records(given(*messages), tokenizer, stop_ids)
    assert "<think>the sea</think>" in tokenizer.decode(first.answer_token_ids)
    assert "think>" not in tokenizer.decode(second.prompt_token_ids)
    assert ANSWERS[0] in tokenizer.decode(second.prompt_token_ids)
    # The history changed, so the second answer cannot share a text with the first.
    joined = first.prompt_token_ids + first.answer_token_ids
    assert second.prompt_token_ids[: len(joined)] != joined


def test_a_token_across_the_border_is_split_there() -> None:
    """Two line breaks are one token here: the answer's own begins behind the prompt's."""
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    tokenizer.add_tokens(["\n\n"])
    messages = (MULTI_TURN[0], {"role": "assistant", "content": "\nthe sea"})
    (record,) = to_records(given(*messages), tokenizer, stops("chatml", tokenizer))
    joined = record.prompt_token_ids + record.answer_token_ids
    assert tokenizer.convert_tokens_to_ids("\n\n") not in joined
    assert tokenizer.decode(record.answer_token_ids) == "\nthe sea<|im_end|>"
    whole = tokenizer.apply_chat_template(list(messages), return_dict=False)
    assert tokenizer.convert_tokens_to_ids("\n\n") in whole  # else this tests nothing


def test_an_unstable_template_is_refused_with_a_sample() -> None:
    unstable = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    tokenizer = make_tokenizer(replace(FAMILIES["chatml"], template=unstable))
    with pytest.raises(HeadsError, match="not stable where the answer begins") as caught:
        to_records(given(*MULTI_TURN), tokenizer, [])
    assert "<think>" in str(caught.value)
    assert "It is called" in str(caught.value)
    assert str(caught.value).startswith("data.jsonl:1: turn 2: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "template", "said"),
    [
        (MULTI_TURN[:1], CHATML, "found the turns user; expected an assistant turn"),
        ((MULTI_TURN[1], MULTI_TURN[0]), CHATML, "found the turns assistant, user"),
        (MULTI_TURN[:2], None, "chat_template: found none"),
        ((MULTI_TURN[0], {"role": "assistant", "content": ""}), "{{ messages[0].content }}",
         "found no token of 9 to be the assistant's.*'What is the name of the ship"),
        (MULTI_TURN[:2], "{% if not add_generation_prompt %}{{ messages[1].content }}{% endif %}",
         "found every token of .*'It is called the Swan"),
        (({"role": "user", "content": "a"}, *MULTI_TURN[:2]), FAMILIES["instructions"].template,
         "refuses a conversation of user, user.*roles must alternate"),
    ],
)  # fmt: skip
def test_bad_conversations(messages: Any, template: str | None, said: str) -> None:
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    tokenizer.chat_template = template
    with pytest.raises(HeadsError, match=said) as caught:
        to_records(given(*messages), tokenizer, [])
    assert "\n" not in str(caught.value)


def test_masks_of_one_kind_only() -> None:
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    ids = tokenizer.encode("the ship", add_special_tokens=False)
    for mask, found in ((False, "no token"), (True, "every token")):
        with pytest.raises(HeadsError, match=f"here: answer mask: found {found}.*'the ship'"):
            check_mask(MaskedText(ids, [mask] * len(ids)), tokenizer, "here")
