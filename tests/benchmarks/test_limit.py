"""The arithmetic of `benchmarks.limit`, with an engine that only counts."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.limit import Drafting, Steady, _between, steady
from benchmarks.wrong_drafts import WrongDrafts


def test_costs_between_measured_numbers_lie_on_straight_lines() -> None:
    steps = {0: 1.0, 2: 2.0, 4: 6.0}
    assert [_between(steps, drafts) for drafts in (0, 0.5, 2, 3, 4, 9)] == [1, 1.25, 2, 4, 6, 6]


def test_wrong_drafts_go_to_requests_that_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrongDrafts, "count", 2)
    assert WrongDrafts(None).propose([[5], [], [6, 7]], slot_mappings=None) == [[1, 1], [], [1, 1]]


def test_means_are_over_all_runs() -> None:
    kept = Steady([1.0, 2.0], [3, 0], 4, Drafting(0.5, 7, 0.25, 0.125))
    kept.add(Steady([3.0], [1], 5, Drafting(0.25, 1, 0.125, 0.0)))
    assert (kept.step, kept.tokens_per_step) == (2.0, 3.0)
    assert kept.drafting == Drafting(0.75, 8, 0.375, 0.125)
    assert kept.drafts == [3, 0, 1]


class CountingEngine:
    """Two requests: the second one's prompt takes a step more; the first ends after five steps."""

    LENGTHS = ((1, 0), (2, 1), (4, 2), (5, 4), (6, 6))

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting
        self.names: list[str] = []
        self.done = 0

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.names.append(name)

    def has_unfinished_requests(self) -> bool:
        return self.done < len(self.LENGTHS)

    def step(self) -> list[Any]:
        lengths = self.LENGTHS[self.done]
        self.done += 1
        self.drafting.drafts += 10**self.done
        self.drafting.heads_seconds += 2.0**self.done
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[0] * length)],
                finished=self.done == len(self.LENGTHS),
            )
            for name, length in zip(self.names, lengths, strict=True)
            if length
        ]


def test_only_steps_in_which_all_decode_count(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    drafting = Drafting()
    found = steady(SimpleNamespace(llm_engine=CountingEngine(drafting)), [[1], [2]], 6, drafting)
    assert len(found.seconds) == 2  # the third and fourth step
    assert found.drafts == [10**3, 10**4]
    assert found.drafting.heads_seconds == 2.0**3 + 2.0**4
    assert found.tokens == (4 + 2) - (2 + 1) + (5 + 4) - (4 + 2)
