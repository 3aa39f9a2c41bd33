"""Accepted drafts by origin: what is counted, what is forgotten, and when it is logged."""

from __future__ import annotations

import logging

import pytest

from vllm_bpd.tally import Tally

HEADS, TEXT = False, True


def counted(made: Tally) -> tuple[int, int]:
    return made.from_heads, made.from_context


def test_accepted_drafts_are_counted_by_origin() -> None:
    made = Tally()
    made.note_drafts("a", [HEADS, TEXT, TEXT])
    made.note_drafts("b", [TEXT, HEADS])
    # One token of each is the target's own, the others are accepted drafts.
    made.count_accepted(["b", "a"], [[1, 2, 3], [4, 5, 6]])
    assert counted(made) == (2, 2)
    made.note_drafts("a", [HEADS, HEADS])
    made.count_accepted(["a"], [[1, 2]])
    assert counted(made) == (3, 2)


@pytest.mark.parametrize(("sampled", "heads", "text"), [
    ([], 0, 0),
    ([9], 0, 0),
    ([9, 9], 1, 0),
    ([9, 9, 9], 1, 1),
    ([9, 9, 9, 9], 2, 1),
    ([9, 9, 9, 9, 9], 2, 1),  # more than drafts and one: there is nothing more to count
])  # fmt: skip
def test_what_verification_refused_is_not_counted(
    sampled: list[int], heads: int, text: int
) -> None:
    made = Tally()
    made.note_drafts("a", [HEADS, TEXT, HEADS])
    made.count_accepted(["a"], [sampled])
    assert counted(made) == (heads, text)


def test_drafts_count_for_the_next_step_only() -> None:
    made = Tally()
    made.note_drafts("gone", [HEADS, TEXT])
    made.note_drafts("here", [HEADS, TEXT])
    made.count_accepted(["here"], [[1, 2, 3]])
    made.count_accepted(["gone", "here", "new"], [[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert counted(made) == (1, 1)


def test_the_engine_may_have_room_for_more_requests_than_it_names() -> None:
    made = Tally()
    made.note_drafts("a", [TEXT])
    made.count_accepted(["a", "spare"], [[1, 2]])
    assert counted(made) == (0, 1)


def test_it_is_logged_now_and_then_once_there_is_something(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    made = Tally()

    def step(after: float, tokens: list[int]) -> list[str]:
        nonlocal now
        now += after
        caplog.clear()
        made.note_drafts("a", [HEADS, TEXT, TEXT])
        made.count_accepted(["a"], [tokens])
        return caplog.messages

    with caplog.at_level(logging.INFO, logger="vllm_bpd.tally"):
        assert step(31, [1]) == []  # nothing was accepted
        assert step(29, [1, 2, 3, 4]) == []  # too early
        assert step(2, [1, 2]) == [
            "bpd: 4 drafts accepted: 2 from the heads, 2 from the requests' own text"
        ]
        assert step(1, [1, 2]) == []
        assert len(step(40, [1, 2])) == 1
        assert step(40, [1]) == []  # nothing more than the last line says
        assert len(step(40, [1, 2])) == 1
