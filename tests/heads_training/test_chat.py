"""The chat template's user prefix, stop tokens, and whether two vocabularies are one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads_training.chat import (
    check_same_vocabulary,
    load_tokenizer,
    prompt_ids,
    stop_token_ids,
    user_prefix,
)
from tests.heads_training.tiny_chat import FAMILIES, make_tokenizer
from vllm_bpd.errors import HeadsError

HISTORY = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def test_user_prefix() -> None:
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    assert user_prefix(tokenizer) == "<|im_start|>user\n"
    assert user_prefix(tokenizer, HISTORY) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\n"
    )
    tokenizer.chat_template = None
    with pytest.raises(HeadsError, match="chat_template: found none"):
        user_prefix(tokenizer)


def test_prompts_end_where_the_answer_begins() -> None:
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    text = tokenizer.decode(prompt_ids(tokenizer, HISTORY[:1]))
    assert text == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("stored", "more"), [(None, []), (7, [7]), ([3, 7], [3, 7])])
def test_stop_tokens(tmp_path: Path, stored: object, more: list[int]) -> None:
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    own = tokenizer.eos_token_id
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    assert stop_token_ids(tmp_path, tokenizer) == tuple(sorted({own, *more}))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(HeadsError, match=r"generation_config.json: not readable"):
        stop_token_ids(tmp_path, tokenizer)


def test_vocabularies() -> None:
    ours, same = (make_tokenizer(FAMILIES["chatml"]) for _ in range(2))
    check_same_vocabulary(ours, same, "teacher/a")
    same.add_tokens(["more"])
    for pair in ((ours, same), (same, ours)):
        with pytest.raises(HeadsError, match=r"teacher: teacher/b: its vocabulary.*'more' has id"):
            check_same_vocabulary(*pair, "teacher/b")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=r"teacher: .*found no tokenizer") as caught:
        load_tokenizer(tmp_path, "teacher")
    assert "\n" not in str(caught.value)
