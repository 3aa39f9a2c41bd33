"""The target's tokenizer and chat template: prompts as ids, where a turn begins, where one ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_bpd.errors import HeadsError, read_json

Message = dict[str, str]  # role and content

_MARK = "\u241fbpd-user-turn\u241f"  # stands for a user turn in a rendered template


def load_tokenizer(folder: Path, field: str = "target") -> Any:
    """The tokenizer stored in `folder`. Raises HeadsError, naming `field`, if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadsError(
            f"{field}: {folder}: found no tokenizer that can be loaded ({reason}); expected "
            "tokenizer.json or what transformers reads in its place"
        ) from None


def stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's, and those of `generation_config.json`.

    These are the ones that vLLM stops at for a model in `folder`, ascending.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    path = folder / "generation_config.json"
    if path.is_file():
        found = read_json(path, "a generation config").get("eos_token_id")
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    return tuple(sorted(ids))


def require_template(tokenizer: Any) -> None:
    """Raise HeadsError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise HeadsError(
            "chat_template: found none in the target's tokenizer; expected one, since heads are "
            "trained on conversations as the server renders them"
        )


def render(tokenizer: Any, messages: Sequence[Message], answer_next: bool) -> tuple[str, list[int]]:
    """(text, ids) of `messages` in the chat template; with `answer_next`, up to where an
    assistant's turn begins. Raises HeadsError if the template refuses them.
    """
    options = {"add_generation_prompt": answer_next}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, **options
        )
    except Exception as error:  # a template may raise any error, its own included
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        roles = ", ".join(message["role"] for message in messages)
        raise HeadsError(
            f"chat_template: refuses a conversation of {roles} ({reason}); change or leave out "
            "such conversations"
        ) from None
    return text, list(ids)


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of `messages` up to where the answer begins, as the server renders them."""
    return render(tokenizer, messages, answer_next=True)[1]


def user_prefix(tokenizer: Any, history: Sequence[Message] = ()) -> str:
    """The chat template's text up to where the user turn behind `history` begins.

    Raises HeadsError if the tokenizer has no chat template.
    """
    require_template(tokenizer)
    text, _ = render(tokenizer, [*history, {"role": "user", "content": _MARK}], answer_next=False)
    return text[: text.index(_MARK)]


def check_same_vocabulary(target: Any, teacher: Any, name: str) -> None:
    """Refuse a teacher whose tokenizer gives another meaning to an id. `name` is the teacher's."""
    ours, theirs = target.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda pair: pair[1])[0]
    raise HeadsError(
        f"teacher: {name}: its vocabulary is not the target's (token {token!r} has id "
        f"{theirs.get(token)} there, {ours.get(token)} in the target); expected a teacher with "
        "the target's tokenizer"
    )
