"""Model runner V1: which rows are drafted from, and how the engine is led to our drafter."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_bpd import proposer
from vllm_bpd.proposer import PROPOSER, BpdProposer, Texts, last_accepted_rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Sampled ids of each request, and how many drafts each had; some sampled nothing."""
    drafts = draw(st.lists(st.integers(0, 7), max_size=12))
    sampled = [draw(st.lists(st.integers(0, 99), max_size=count + 1)) for count in drafts]
    return sampled, drafts


def rows_by_listing(sampled: list[list[int]], drafts: list[int]) -> dict[int, int]:
    """The same by writing down what each row of the batch is."""
    owners = [(i, j) for i, count in enumerate(drafts) for j in range(count + 1)]
    return {i: owners.index((i, len(ids) - 1)) for i, ids in enumerate(sampled) if ids}


@given(batches())
def test_rows_are_those_of_the_last_accepted_positions(
    batch: tuple[list[list[int]], list[int]],
) -> None:
    sampled, drafts = batch
    assert last_accepted_rows(sampled, drafts) == rows_by_listing(sampled, drafts)


@given(st.lists(st.lists(st.integers(0, 99), max_size=1), max_size=12))
def test_without_drafts_each_request_has_one_row(sampled: list[list[int]]) -> None:
    assert last_accepted_rows(sampled, None) == last_accepted_rows(sampled, [0] * len(sampled))
    assert last_accepted_rows(sampled, None) == {i: i for i, ids in enumerate(sampled) if ids}


class EchoHeads:
    """Drafts `[row, sampled id, row + sampled id]`, and counts its calls."""

    lattice_weights_PF = None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, hidden_BD: Tensor, sampled_B: Tensor) -> Tensor:
        assert hidden_BD.shape[0] == sampled_B.shape[0] > 0
        self.calls += 1
        row_B = hidden_BD[:, 0].long()
        return torch.stack([row_B, sampled_B, row_B + sampled_B], dim=-1)


ALWAYS = {
    "min_confidence": 0.1,
    "min_confidence_per_batch_size": None,
    "heads_up_to_batch_size": None,
}


@pytest.fixture
def drafter() -> BpdProposer:
    made = BpdProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(**ALWAYS),
            device_config=SimpleNamespace(device_type="cpu"),
        )
    )
    made.model = EchoHeads()  # type: ignore[assignment]
    return made


def table(*rows: list[int]) -> Texts:
    """What each request says so far, as the engine lays it down: stale ids behind its end."""
    tokens_TL = np.full((len(rows), 24), 6, np.int32)
    for tokens_L, row in zip(tokens_TL, rows, strict=True):
        tokens_L[: len(row)] = row
    names = [f"request {i}" for i in range(len(rows))]
    return Texts(names, tokens_TL, np.array([len(row) for row in rows], np.int32))


NO_TEXTS = table([1], [1], [1], [1])  # heads alone never look there


def states(rows: int) -> Tensor:
    """Hidden states that name their row."""
    return torch.arange(rows).float()[:, None].expand(rows, 4).contiguous()


def test_each_request_is_drafted_for_from_its_row(drafter: BpdProposer) -> None:
    sampled = [[11], [21, 22], [], [41, 42, 43]]
    drafts = drafter.propose(sampled, states(8), [0, 2, 0, 2], 3, NO_TEXTS)
    assert drafts == [[0, 11, 11], [2, 22, 24], [], [7, 43, 50]]


def test_a_batch_without_drafts_under_verification(drafter: BpdProposer) -> None:
    drafts = drafter.propose([[5], [], [6]], states(3), None, 3, NO_TEXTS)
    assert drafts == [[0, 5, 5], [], [2, 6, 8]]


def test_fewer_drafts_are_the_first_ones(drafter: BpdProposer) -> None:
    assert drafter.propose([[5]], states(1), None, 2, NO_TEXTS) == [[0, 5]]


@pytest.mark.parametrize(
    ("sampled", "count"), [([], 3), ([[], []], 3), ([[5], [6]], 0)], ids=["none", "prefill", "zero"]
)
def test_nothing_to_draft_runs_nothing(
    drafter: BpdProposer, sampled: list[list[int]], count: int
) -> None:
    assert drafter.propose(sampled, states(2), None, count, NO_TEXTS) == [[] for _ in sampled]
    assert drafter.model.calls == 0  # type: ignore[union-attr]


def test_heads_without_a_lattice_rest_in_a_large_batch(drafter: BpdProposer) -> None:
    drafter.vllm_config.speculative_config.heads_up_to_batch_size = len(NO_TEXTS.request_ids) - 1
    assert drafter.propose([[5], [6]], states(2), None, 3, NO_TEXTS) == [[], []]
    assert drafter.model.calls == 0  # type: ignore[union-attr]


def test_proposing_before_loading_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="load_model"):
        BpdProposer(SimpleNamespace()).propose([[1]], states(1), None, 1, NO_TEXTS)


def config(method: str | None) -> Any:
    speculative = None if method is None else SimpleNamespace(method=method, model="heads")
    return SimpleNamespace(speculative_config=speculative)


def test_the_runner_builds_our_drafter_through_its_custom_class() -> None:
    seen = []
    made = config("bpd")

    def original(runner: Any, vllm_config: Any, device: Any) -> None:
        speculative = vllm_config.speculative_config
        seen.append((runner, speculative.method, speculative.model, device))

    proposer.init_runner(original, "runner", made, "cpu")
    assert seen == [("runner", "custom_class", PROPOSER, "cpu")]
    assert (made.speculative_config.method, made.speculative_config.model) == ("bpd", "heads")
    module, name = PROPOSER.rsplit(".", 1)
    assert getattr(__import__(module, fromlist=["_"]), name) is BpdProposer


def test_the_config_is_put_back_when_the_runner_fails() -> None:
    made = config("bpd")

    def original(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        proposer.init_runner(original, "runner", made, "cpu")
    assert (made.speculative_config.method, made.speculative_config.model) == ("bpd", "heads")


@pytest.mark.parametrize("method", [None, "ngram", "custom_class"])
def test_other_methods_build_their_own(method: str | None) -> None:
    seen = []
    made = config(method)
    proposer.init_runner(lambda *given: seen.append(given), "runner", made, "cpu")
    assert seen == [("runner", made, "cpu")]
    if method is not None:
        assert made.speculative_config.method == method


HANDLE = "llvmlite.binding.ffi"


def test_a_second_engine_does_not_look_into_llvmlites_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, HANDLE, SimpleNamespace())
    handle, seen = sys.modules[HANDLE], []

    def original(overrides: Any) -> None:
        seen.append((overrides, HANDLE in sys.modules))

    proposer.register_kernels(original, "overrides")
    assert seen == [("overrides", False)]
    assert sys.modules[HANDLE] is handle

    def fail(overrides: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        proposer.register_kernels(fail, None)
    assert sys.modules[HANDLE] is handle


def test_without_numba_there_is_no_handle_to_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, HANDLE, raising=False)
    proposer.register_kernels(lambda overrides: None, None)
    assert HANDLE not in sys.modules


def test_our_drafter_is_given_the_hidden_states_of_the_sampled_rows(drafter: BpdProposer) -> None:
    texts = table([7, 8], [9])
    runner = SimpleNamespace(
        drafter=drafter,
        input_batch=SimpleNamespace(
            req_ids=texts.request_ids,
            token_ids_cpu=texts.tokens_TL,
            num_tokens_no_spec=texts.lengths_T,
        ),
    )
    output = SimpleNamespace(num_spec_tokens_to_schedule=2)
    metadata = SimpleNamespace(num_draft_tokens=[1, 0])

    greedy = SimpleNamespace(temperature=None)

    def original(*_: Any) -> None:
        raise AssertionError("the engine's own was called")

    drafts = proposer.propose_draft_token_ids(
        original, runner, output, [[7, 8], [9]], greedy, states(9), states(3), None, metadata,
        None, None,
    )  # fmt: skip
    assert drafts == [[1, 8], [2, 9]]
    assert (runner._draft_probs, runner._draft_prob_req_ids) == (None, None)


@pytest.mark.parametrize("runner", [SimpleNamespace(), SimpleNamespace(drafter="another")])
def test_other_drafters_are_passed_everything(runner: Any) -> None:
    given = tuple(f"argument {i}" for i in range(9))
    passed = proposer.propose_draft_token_ids(lambda *args: args, runner, *given)  # type: ignore[arg-type]
    assert passed == (runner, *given)
