"""Given conversations as token ids, and which of these the loss covers: the assistant's own.

An answer is found by rendering the chat template twice, up to where the assistant's turn begins
and up to where it ends: the ids of the first have to be the first ids of the second, and what
follows, to the first stop token, is the answer. No text is searched for.

Templates may render a turn differently once others follow (thinking is often taken out of earlier
turns). So there is one record for each assistant turn, with the history as the template renders it
at that point, which is what the server reads there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heads_training.chat import Message, render, require_template
from heads_training.prompts import Conversation
from heads_training.records import Record
from vllm_bpd.errors import HeadsError

GIVEN = "given"  # the finish reason of a given answer
_SAMPLE = 60  # characters of text that an error shows


@dataclass(frozen=True)
class MaskedText:
    """Token ids, and for each whether it is the assistant's."""

    token_ids: list[int]
    answer_mask: list[bool]  # as long; neither all true nor all false


def to_records(conversation: Conversation, tokenizer: Any, stop_ids: Sequence[int]) -> list[Record]:
    """One record for each assistant turn that follows a user turn.

    Raises HeadsError, showing a sample, if there is none, if the template is not stable where the
    answer begins, or if an answer or what stands before it has no token.
    """
    return [
        Record(prompt, answer, GIVEN, conversation.source)
        for prompt, answer in _turns(conversation, tokenizer, stop_ids)
    ]


def check_mask(text: MaskedText, tokenizer: Any, where: str) -> None:
    """Raise HeadsError, showing the text's beginning, if its mask is all one or all zero."""
    if any(text.answer_mask) and not all(text.answer_mask):
        return
    found = "every token" if text.token_ids and all(text.answer_mask) else "no token"
    raise HeadsError(
        f"{where}: answer mask: found {found} of {len(text.token_ids)} to be the assistant's; "
        "expected some, behind a prompt; the text begins "
        f"{_quote(tokenizer.decode(text.token_ids))}"
    )


def _turns(
    conversation: Conversation, tokenizer: Any, stop_ids: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of each assistant turn."""
    require_template(tokenizer)
    messages = conversation.messages
    turns = []
    for i, message in enumerate(messages):
        asked = any(earlier["role"] == "user" for earlier in messages[:i])
        if message["role"] != "assistant" or not asked:
            continue  # an assistant's greeting answers nothing
        where = f"{conversation.where}: turn {i + 1}"
        prompt, whole = _split(messages[: i + 1], tokenizer, where)
        answer = _to_stop(whole[len(prompt) :], stop_ids)
        mask = [False] * len(prompt) + [True] * len(answer)
        check_mask(MaskedText(prompt + answer, mask), tokenizer, where)
        turns.append((prompt, answer))
    if not turns:
        roles = ", ".join(message["role"] for message in messages) or "nothing"
        raise HeadsError(
            f"{conversation.where}: found the turns {roles}; expected an assistant turn behind a "
            "user turn, since the answers are to be the given ones"
        )
    return turns


def _split(messages: Sequence[Message], tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    """Ids up to where the last turn, the assistant's, begins, and up to where it ends."""
    before, prompt = render(tokenizer, messages[:-1], answer_next=True)
    after, whole = render(tokenizer, messages, answer_next=False)
    if whole[: len(prompt)] == prompt:
        return prompt, whole
    if after.startswith(before):
        # A token spans the border. The server has read the prompt by then, so the answer's ids
        # start at the border, if they can be told apart from the prompt's at all.
        joined = prompt + tokenizer.encode(after[len(before) :], add_special_tokens=False)
        if tokenizer.decode(joined) == tokenizer.decode(whole):
            return prompt, joined
    same = next(
        (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(after)),
    )
    raise HeadsError(
        f"{where}: chat_template: not stable where the answer begins: without it the text goes "
        f"{_quote(before[max(same - 20, 0) :])}, with it {_quote(after[max(same - 20, 0) :])}; "
        "expected the first to begin the second; let the target answer (--answers-from target), "
        "or train with another template"
    )


def _to_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """`ids` to the first stop token, which the target would say; templates may go on behind it."""
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[:end]


def _quote(text: str) -> str:
    return repr(text[:_SAMPLE] + ("..." if len(text) > _SAMPLE else ""))
