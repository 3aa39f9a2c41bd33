"""Model runner V1 with a lattice: what is drafted from the engine's table, and where it ends."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba", reason="comes with vLLM")

from tests.vllm_bpd.plain_lattice import continuing_weights
from vllm_bpd import confidence, lattice_host, proposer
from vllm_bpd.confidence import ConfidenceSchedule
from vllm_bpd.proposer import BpdProposer, Texts

HIDDEN, HEADS, PLACES = 4, 2, 5


class SayingHeads:
    """Two heads that say 20 + row and 40 + sampled id, nine times of ten."""

    places = PLACES
    config = SimpleNamespace(hidden_size=HIDDEN)

    def __init__(self) -> None:
        self.lattice_weights_PF = continuing_weights(PLACES)
        self.batches: list[tuple[int, torch.dtype]] = []

    def candidates(self, hidden_BD: Tensor, sampled_B: Tensor) -> tuple[Tensor, Tensor]:
        assert hidden_BD.shape == (len(sampled_B), HIDDEN)
        self.batches.append((len(sampled_B), hidden_BD.dtype))
        ids_BK = torch.stack([20 + hidden_BD[:, 0].long(), 40 + sampled_B], 1)
        return ids_BK.unsqueeze(2), torch.full((len(sampled_B), HEADS, 1), math.log(0.9))


def make(**changed: Any) -> BpdProposer:
    """A drafter of these heads, `changed` fields of its speculative config replaced."""
    fields = {
        "context_lookup": True,
        "context_window": 100,
        "min_confidence": 0.0,
        "min_confidence_per_batch_size": None,
        "heads_up_to_batch_size": None,
    }
    made = BpdProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(**fields | changed),
            device_config=SimpleNamespace(device="cpu", device_type="cpu"),
        )
    )
    made.model = SayingHeads()  # type: ignore[assignment]
    return made


def heads_of(made: BpdProposer) -> SayingHeads:
    heads: Any = made.model
    assert isinstance(heads, SayingHeads)
    return heads


def table(*rows: list[int]) -> Texts:
    """What each request says so far, as the engine lays it down: stale ids behind its end."""
    tokens_TL = np.full((len(rows) + 1, 24), 6, np.int32)
    for tokens_L, row in zip(tokens_TL, rows, strict=False):
        tokens_L[: len(row)] = row
    lengths_T = np.array([len(row) for row in rows] + [3], np.int32)
    return Texts([f"request {i}" for i in range(len(rows))], tokens_TL, lengths_T)


def states(rows: int) -> Tensor:
    """Hidden states that name their row."""
    return torch.arange(rows).float()[:, None].expand(rows, HIDDEN).contiguous()


# The first and the last repeat themselves; the third is not through its prompt.
TEXTS = table([5, 6, 7, 8, 9, 5, 6], [1, 2, 3], [5, 6, 5], [12, 6, 4, 12])
SAMPLED = [[5, 6], [3], [], [12]]
UNDER_VERIFICATION = [1, 2, 0, 1]
ROWS = 8  # of which 1, 2 and 6 are the last accepted ones


def drafts(
    made: BpdProposer, num_drafts: int = PLACES, temperature_B: Tensor | None = None
) -> list[list[int]]:
    return made.propose(SAMPLED, states(ROWS), UNDER_VERIFICATION, num_drafts, TEXTS, temperature_B)


def test_each_request_is_drafted_for_as_far_as_heads_or_its_text_reach() -> None:
    made = make()
    assert drafts(made) == [[7, 8, 9, 5, 6], [22, 43], [], [6, 4, 12, 6, 4]]
    assert heads_of(made).batches == [(3, torch.float32)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_drafts_are_the_first_ones(count: int) -> None:
    whole = drafts(make())
    assert drafts(make(), count) == [ids[:count] for ids in whole]


def test_no_draft_at_all_asks_no_head() -> None:
    made = make()
    assert drafts(made, 0) == [[], [], [], []]
    assert heads_of(made).batches == []


def test_without_context_lookup_the_heads_draft_alone() -> None:
    assert drafts(make(context_lookup=False)) == [[21, 46], [22, 43], [], [26, 52]]


def test_the_text_is_searched_as_far_back_as_the_window_reaches() -> None:
    assert drafts(make(context_window=7))[0] == [7, 8, 9, 5, 6]
    assert drafts(make(context_window=6))[0] == [7, 8, 9, 5, 6]  # by its last word alone
    assert drafts(make(context_window=5))[0] == [21, 46]


def test_unlikely_drafts_are_left_out() -> None:
    """A head's draft has 0.9 / 1.9 beside "another token", two of them 0.22."""
    first, last = [7, 8, 9, 5, 6], [6, 4, 12, 6, 4]
    assert drafts(make(min_confidence=0.25)) == [first, [22], [], last]
    assert drafts(make(min_confidence=0.5)) == [first, [], [], last]


def test_the_batch_size_decides_how_likely_a_draft_must_be() -> None:
    """Four requests: the range from 3 to 4 holds for them."""
    strict = [(1, 2, 0.0), (3, 4, 0.5), (5, 9, 0.0)]
    made = make(min_confidence_per_batch_size=strict)
    assert drafts(made) == drafts(make(min_confidence=0.5))
    assert drafts(made) != drafts(make())


def test_where_nothing_can_be_sure_enough_the_heads_do_not_run() -> None:
    made = make(min_confidence_per_batch_size=[(1, 3, 0.0), (4, 4, 1.0)])
    assert drafts(made) == [[], [], [], []]
    assert heads_of(made).batches == []


def test_in_a_large_batch_the_text_drafts_alone() -> None:
    """Four requests; the second one's text repeats nothing."""
    made = make(heads_up_to_batch_size=3)
    assert drafts(made) == [[7, 8, 9, 5, 6], [], [], [6, 4, 12, 6, 4]]
    assert heads_of(made).batches == []
    assert drafts(make(heads_up_to_batch_size=4)) == drafts(make())


def test_on_a_cpu_the_heads_rest_unless_told_how_sure_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsure = ConfidenceSchedule((1,), (0.0,), heads_up_to=3)
    monkeypatch.setattr(confidence, "ON_CPU", unsure)
    made = make(min_confidence=None)
    assert drafts(made) == drafts(make(heads_up_to_batch_size=3))
    assert heads_of(made).batches == []
    assert drafts(make(min_confidence=None, heads_up_to_batch_size=4)) == drafts(make())


@pytest.mark.parametrize("alone", [False, True])
def test_on_a_cpu_requests_that_sample_rest_in_a_large_batch(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Four requests, of which the second alone is greedy, or all sample."""
    temperature_B = torch.tensor([0.7, 0.7 if alone else 0.0, 1.0, 0.2])
    whole = drafts(make())
    for most in (3, 4):
        least_sure = ConfidenceSchedule((1,), (0.0,), sampled_up_to=most)
        monkeypatch.setattr(confidence, "ON_CPU", least_sure)
        made = make(min_confidence=None)
        if most == 4:
            assert drafts(made, temperature_B=temperature_B) == whole
            continue
        rest: list[list[int]] = [[], [] if alone else whole[1], [], []]
        assert drafts(made, temperature_B=temperature_B) == rest
        assert [size for size, _ in heads_of(made).batches] == ([] if alone else [1])
        assert drafts(made) == whole  # all are greedy
    assert drafts(make(), temperature_B=temperature_B) == whole  # told how sure to be


def test_in_a_large_batch_without_context_lookup_nothing_drafts() -> None:
    made = make(heads_up_to_batch_size=0, context_lookup=False)
    assert drafts(made) == [[], [], [], []]
    assert heads_of(made).batches == []


def test_accepted_drafts_are_counted_by_origin() -> None:
    made = make()
    assert drafts(made) == [[7, 8, 9, 5, 6], [22, 43], [], [6, 4, 12, 6, 4]]
    # Of the first request three are accepted, of the second one, of the last none; the batch has
    # another order now, and a new request.
    texts = Texts(["request 3", "new", "request 1", "request 0"], TEXTS.tokens_TL, TEXTS.lengths_T)
    sampled = [[4], [4, 4], [22, 4], [7, 8, 9, 4]]
    made.propose(sampled, states(20), [2, 5, 2, 5], PLACES, texts)
    assert (made.tally.from_heads, made.tally.from_context) == (1, 3)


def test_drafts_that_are_not_asked_for_again_count_nothing() -> None:
    made = make()
    drafts(made)
    made.propose([[4]], states(1), None, 0, table([1, 4]))
    made.propose([[7, 8, 9]], states(3), [2], PLACES, table([1, 4, 7, 8, 9]))
    assert (made.tally.from_heads, made.tally.from_context) == (0, 0)


def test_the_engines_own_table_is_searched() -> None:
    made = make()
    batch = SimpleNamespace(
        req_ids=TEXTS.request_ids,
        token_ids_cpu=TEXTS.tokens_TL,
        num_tokens_no_spec=TEXTS.lengths_T,
    )
    found = proposer.propose_draft_token_ids(
        lambda *_: pytest.fail("the engine's own was called"),
        SimpleNamespace(drafter=made, input_batch=batch),
        SimpleNamespace(num_spec_tokens_to_schedule=PLACES),
        SAMPLED,
        SimpleNamespace(temperature=None),
        states(9),
        states(ROWS),
        None,
        SimpleNamespace(num_draft_tokens=UNDER_VERIFICATION),
        None,
        None,
    )
    assert found == drafts(make())


def load(made: BpdProposer, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_model`, which finds `heads`, in an engine of bf16 on a CPU."""
    made.vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    found = SimpleNamespace(load_heads_model=lambda config, target: heads)
    monkeypatch.setitem(sys.modules, "vllm_bpd.model", found)  # the real one imports vLLM
    made.load_model(nn.Module())


def test_drafting_is_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made, heads = make(), SayingHeads()
    original = lattice_host.draft_blocks
    asked: list[tuple[Any, ...]] = []

    def draft_blocks(*given: Any) -> Any:
        asked.append(given)
        return original(*given)

    monkeypatch.setattr(lattice_host, "draft_blocks", draft_blocks)
    load(made, heads, monkeypatch)
    assert heads.batches == [(1, torch.bfloat16)]
    assert made.tally._drafted == {}
    drafts(made)

    # What is compiled depends on types, dimensions and memory layout alone.
    def kinds(given: tuple[Any, ...]) -> list[Any]:
        return [
            (each.dtype, each.ndim, each.flags.c_contiguous, each.flags.writeable)
            if isinstance(each, np.ndarray)
            else type(each)
            for each in given
        ]

    assert kinds(asked[0]) == kinds(asked[1])


def test_heads_without_a_lattice_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, heads = make(), SayingHeads()
    heads.lattice_weights_PF = None  # type: ignore[assignment]
    load(made, heads, monkeypatch)
    assert heads.batches == []
