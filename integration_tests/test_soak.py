"""What fails a soak, with no server: a stand-in for one, and for what it answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration_tests import soak
from integration_tests.harness.traffic import CONTEXT, KINDS, REFUSAL, Ask, alike, broken, catalogue

GROWN = {
    "spec_decode_num_drafts_total": 3.0,
    "spec_decode_num_draft_tokens_total": 9.0,
    "spec_decode_num_accepted_tokens_total": 2.0,
    "num_preemptions_total": 1.0,
}
ASK = Ask("plain", [1, 2], {})


def made(tmp_path: Path, metrics: dict[str, float] = GROWN, minutes: float = 0.0) -> soak.Soak:
    """A soak of one request, `minutes` old."""
    server: Any = SimpleNamespace(
        url="http://127.0.0.1:9",
        process=SimpleNamespace(poll=lambda: None),
        metrics=lambda: metrics,
        resident=lambda: 1 << 20,
    )
    found = soak.Soak(server, [(ASK, {False: ["a"], True: ["a"]})], tmp_path / "soak.json")
    found.started -= 60 * minutes
    return found


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Let every request be answered like this, or fail with it."""

    def send(_client: Any, ask: Ask, *_: Any) -> Any:
        if ask.kind != "plain":
            return []
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(soak, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(soak, "send", send)
    monkeypatch.setattr(soak, "sampled", lambda _: Ask("sampled", [1], {}))


def test_all_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ["a"])
    run = made(tmp_path)
    run.run(0.01)
    assert run.verdict() == []
    assert "not checked" in run.output.read_text(encoding="utf-8")


def test_a_client_that_ends_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, KeyError("text"))
    run = made(tmp_path)
    run.run(5)  # it ends at once
    assert run.minutes() < 1
    assert "clients ended: KeyError('text')" in run.verdict()[0]


def test_another_answer_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ["b"])
    run = made(tmp_path)
    run.run(0.005)
    assert "answers differ" in run.verdict()[0]


@pytest.mark.parametrize("name", GROWN)
def test_an_inert_method_fails_a_long_run(tmp_path: Path, name: str) -> None:
    run = made(tmp_path, {**GROWN, name: 0.0}, minutes=2.1)
    run.sent.update(list(KINDS))
    run.compared = run.dropped = 1
    [said] = run.verdict()
    assert said.endswith(": none")


def test_what_was_never_sent_fails_a_long_run(tmp_path: Path) -> None:
    run = made(tmp_path, minutes=2.1)
    run.sent.update(set(KINDS) - {"stop ids"})
    run.compared = run.dropped = 1
    assert run.verdict() == ["never sent: stop ids"]


def test_a_short_run_need_not_preempt(tmp_path: Path) -> None:
    run = made(tmp_path, {**GROWN, "num_preemptions_total": 0.0}, minutes=1.0)
    run.compared = 1
    assert run.verdict() == []


def test_memory_that_grows_fails_the_run(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.compared = 1
    run.resident = [(1.0, 0), (3.1, 1 << 20), (9.0, 200 << 20)]
    assert run.verdict() == ["memory grew by 199 MiB"]


def test_what_is_refused_has_to_be() -> None:
    refused = Ask("min_p", [1], {})
    assert soak.Soak.difference(refused, {}, False, "refused") == {}
    assert soak.Soak.difference(refused, {}, False, ["a"])
    assert REFUSAL


def test_answers_are_alike_up_to_rounding() -> None:
    left = [{"text": "a", "logprobs": [("a", -1.0)], "prompt": [None, {"3": -2.0}]}]
    right = [{"text": "a", "logprobs": [("a", -1.0001)], "prompt": [None, {"3": -2.0001}]}]
    assert alike(left, right)
    assert not alike(left, [right[0] | {"text": "b"}])
    assert not alike(left, [right[0] | {"prompt": [None, {"4": -2.0}]}])
    assert not alike(left, [right[0] | {"logprobs": [("a", -1.1)]}])


def test_a_broken_structure_is_seen() -> None:
    ask = Ask("sampled regex", [1], {})
    answer = {"text": "abc-1234the", "reason": "stop"}
    assert broken(ask, [answer]) == ""
    assert broken(ask, [answer | {"text": "abc-1234th"}])
    assert broken(ask, [answer | {"text": "abc-1234th", "reason": "length"}]) == ""


def test_the_catalogue_fits_the_context() -> None:
    for ask in catalogue(20):
        if isinstance(ask.prompt, list) and isinstance(ask.prompt[0], int):
            assert len(ask.prompt) + ask.options["max_tokens"] <= CONTEXT
