from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_bpd.cpu_sampling import (
    apply_sampling_constraints,
    expand_batch_to_tokens,
    sample_recovered_tokens,
    verify,
)


def never(*_: object) -> Tensor:
    raise AssertionError("the engine's own function was called")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_draft_gets_its_requests_value(dtype: torch.dtype) -> None:
    """Requests with two drafts, none and three."""
    values = torch.tensor([3, 7, 5], dtype=dtype)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    spread = expand_batch_to_tokens(never, values, ends, 5)
    assert spread.tolist() == [3, 3, 5, 5, 5]
    assert spread.dtype == dtype


def test_a_fraction_stays_one_and_greedy_becomes_one() -> None:
    values, ends = torch.tensor([0.25, 0.0]), torch.tensor([1, 3], dtype=torch.int32)
    spread = expand_batch_to_tokens(never, values, ends, 3, replace_from=0, replace_to=1)
    assert spread.tolist() == [0.25, 1.0, 1.0]


def test_without_drafts_there_is_nothing_to_spread() -> None:
    spread = expand_batch_to_tokens(never, torch.tensor([3]), torch.tensor([0]), 0)
    assert spread.shape == (0,)


def test_other_devices_keep_the_engines_kernel() -> None:
    values = torch.zeros(2, device="meta")
    given = expand_batch_to_tokens(lambda *arguments: arguments, values, values, 4, 0, 1)  # type: ignore[arg-type]
    assert tuple(given) == (values, values, 4, 0, 1)


def test_no_drafts_no_constraints() -> None:
    logits = torch.zeros(0, 8)
    assert apply_sampling_constraints(never, logits, torch.tensor([0]), None) is logits
    assert apply_sampling_constraints(lambda *_: logits, torch.zeros(1, 8), logits, None) is logits


@dataclass
class Options:
    generators: dict[int, torch.Generator]


def plain_recovered(
    longest: int,
    counts: list[int],
    ends: Tensor,
    drafts: Tensor,
    draft_probs: None,
    probs: Tensor,
    options: Options,
    device: torch.device,
    fp64: bool,
) -> Tensor:
    """The engine's rule, written plainly: one draw of noise a request, for each of its drafts."""
    noise = torch.ones(len(counts), probs.shape[1])
    for row, generator in options.generators.items():
        if counts[row]:
            noise[row].exponential_(generator=generator)
    starts = [0, *ends.tolist()[:-1]]
    recovered = torch.empty_like(drafts)
    for row, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        assert end - start == counts[row]
        for place in range(start, end):
            weights = probs[place].clone()
            weights[drafts[place]] = 0
            recovered[place] = (weights / noise[row]).argmax()
    return recovered


def seeded(rows: list[int]) -> Options:
    return Options({row: torch.Generator().manual_seed(row) for row in rows})


@pytest.mark.parametrize("counts", [[2, 0, 0, 3, 1], [0, 0, 4], [1, 2], [0, 0]])
def test_requests_without_drafts_change_nothing_for_the_others(counts: list[int]) -> None:
    """All but the second request are seeded."""
    ends = torch.tensor(counts).cumsum(0).int()
    probs = torch.rand(sum(counts), 50, generator=torch.Generator().manual_seed(0)).softmax(-1)
    drafts = torch.arange(sum(counts))
    rows = [row for row in range(len(counts)) if row != 1]
    rest = (max(counts), counts, ends, drafts, None, probs)
    device, seen = torch.device("cpu"), list[list[int]]()

    def original(longest: int, given: list[int], *others: Any) -> Tensor:
        seen.append(given)
        return plain_recovered(longest, given, *others)

    options = seeded(rows)
    expected = plain_recovered(*rest, options, device, False)
    found = sample_recovered_tokens(original, *rest, again := seeded(rows), device)
    assert found.tolist() == expected.tolist()
    assert seen == [[count for count in counts if count] or counts]
    for row in rows:  # the next draw is the same too
        assert again.generators[row].get_state().equal(options.generators[row].get_state())


def test_noise_elsewhere_is_the_engines_own() -> None:
    probs = torch.zeros(2, 8, device="meta")
    given = sample_recovered_tokens(
        lambda *arguments: arguments,  # type: ignore[arg-type]
        2, [2, 0], probs, probs, None, probs, "options", probs.device, True,
    )  # fmt: skip
    assert tuple(given) == (2, [2, 0], probs, probs, None, probs, "options", probs.device, True)


@dataclass
class Metadata:
    draft_token_ids: Tensor
    num_draft_tokens: list[int]


@dataclass
class Output:
    sampled_token_ids: Tensor


def test_nothing_comes_from_behind_a_padding_draft() -> None:
    """Two drafts, none, four of padding, and three of which the last is padding; all accepted."""
    drafts = torch.tensor([5, 6, -1, -1, -1, -1, 7, 8, -1], dtype=torch.int32)
    given: list[Any] = []

    def original(*arguments: Any) -> Output:
        given.extend(arguments)
        return Output(torch.tensor([
            [5, 6, 9, -1, -1], [9, -1, -1, -1, -1], [0, 0, 0, 0, 9], [7, 8, 0, 9, -1],
        ]))  # fmt: skip

    metadata = Metadata(drafts, [2, 0, 4, 3])
    output = verify(original, "sampler", metadata, None, torch.zeros(1), "options")
    assert given[1].draft_token_ids.tolist() == [5, 6, 0, 0, 0, 0, 7, 8, 0]
    assert metadata.draft_token_ids is drafts
    assert output.sampled_token_ids.tolist() == [
        [5, 6, 9, -1, -1], [9, -1, -1, -1, -1], [0, -1, -1, -1, -1], [7, 8, 0, -1, -1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "drafts", [torch.tensor([5, 6]), torch.full((2,), -1, device="meta")], ids=["whole", "device"]
)
def test_whole_blocks_and_other_devices_are_the_engines_own(drafts: Tensor) -> None:
    metadata = Metadata(drafts, [2])
    given = verify(lambda *arguments: arguments, 1, metadata, None, drafts, 2)
    assert given == (1, metadata, None, drafts, 2)
