"""Heads on two tensor-parallel ranks: what they draft, and what they say to each other.

Whatever a step is like, both ranks take part in the same collectives, with the same shapes: else
they would wait for each other for ever. And none is as wide as the vocabulary.
"""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the model is made of vLLM's layers")

from tests.vllm_bpd.fresh import drafted_on_rank, run_fresh
from tests.vllm_bpd.samples import (
    HIDDEN,
    fingerprint,
    heads_config,
    lattice_weights,
    random_heads,
    random_matrix,
)
from vllm_bpd.checkpoint import DRAFT_TOKEN_IDS, LATTICE_WEIGHTS
from vllm_bpd.lattice import CANDIDATES
from vllm_bpd.proposer import Texts

# The ranks' steps are run once, for all tests.
pytestmark = pytest.mark.xdist_group("test_ranks")
VOCAB = 131  # odd: vLLM pads it, and the second rank has 35 real ids of 96
PLACES = 4
CASES: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "ids of both ranks": {"ids": range(0, VOCAB, 3)},
    "ids of the first rank": {"ids": (0, 3, 9)},
    "ids of the second rank": {"ids": (97, 99, 130)},
    "replicated heads": {"head_hidden_size": 7},
    "not conditioned": {"conditioning": "none"},
    "heads that rest": {"heads_up_to": 2},
}
TEXTS = Texts(
    ["a", "b", "c"],
    np.array([[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8, 9, 0, 0, 0], [4] * 8], np.int32),
    np.array([8, 5, 8], np.int32),
)


def states(rows: int) -> torch.Tensor:
    return random_matrix(rows, HIDDEN, seed=rows + 20)


def call(name: str, rows: int) -> dict[str, Any]:
    return {"call": name, "arguments": (states(rows), torch.arange(rows) * 40 % VOCAB)}


def propose(
    sampled: list[list[int]], drafts: list[int] | None = None, wanted: int = PLACES
) -> dict[str, Any]:
    """The V1 drafter's step: every request has one row, and one more for each draft."""
    rows = len(sampled) + sum(drafts or [])
    return {"call": "propose", "arguments": (sampled, states(rows), drafts, wanted, TEXTS)}


STEPS: dict[str, dict[str, Any]] = {
    "one request": call("forward", 1),
    "many requests": call("forward", 9),
    "candidates of one": call("candidates", 1),
    "a dummy run": {
        "call": "forward",
        "arguments": (torch.zeros(3, HIDDEN), torch.zeros(3).long()),
    },
    "all sampled": propose([[2], [9], [4]]),
    "one still in its prompt": propose([[2], [], [4]]),
    "all in their prompts": propose([[], [], []]),
    "accepted and rejected": propose([[3, 1, 2], [9], [4, 4]], [2, 3, 1]),
    "one without drafts at its limit": propose([[3, 1, 2], [9], [4]], [2, 0, 1]),
    "a schedule that has switched drafting off": propose([[2], [9], [4]], wanted=0),
}


def case(fields: dict[str, Any]) -> dict[str, Any]:
    """Heads with a lattice, and the target's two matrices over the vocabulary."""
    fields = dict(fields)
    ids, heads_up_to = fields.pop("ids", None), fields.pop("heads_up_to", None)
    config = heads_config(
        target=fingerprint(vocab_size=VOCAB),
        lattice_places=PLACES,
        draft_vocab_size=None if ids is None else len(ids),
        **fields,
    )
    tensors = random_heads(config).state_dict() | {LATTICE_WEIGHTS: lattice_weights(PLACES)}
    if ids is not None:
        tensors[DRAFT_TOKEN_IDS] = torch.tensor(list(ids), dtype=torch.int32)
    return {
        "config": config,
        "tensors": tensors,
        "places": PLACES,
        "heads_up_to": heads_up_to,
        "lm_head": random_matrix(VOCAB, HIDDEN, seed=1),
        "embedding": random_matrix(VOCAB, HIDDEN, seed=2),
    }


@pytest.fixture(scope="module", params=CASES)
def ranks(
    request: pytest.FixtureRequest,
    fresh_process: ForkServerContext,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Any]:
    """Whether heads rest for three requests; results and collectives of every step: of one rank
    alone, then of each of two."""
    made = case(CASES[request.param])
    found: list[Any] = [made["heads_up_to"] is not None]
    for size in (1, 2):
        folder = str(tmp_path_factory.mktemp("group"))
        arguments = [(rank, size, folder, made, list(STEPS.values())) for rank in range(size)]
        found += run_fresh(fresh_process, drafted_on_rank, *arguments)
    return found


@pytest.mark.parametrize("step", STEPS)
def test_two_ranks_draft_what_one_does(ranks: list[Any], step: str) -> None:
    place = list(STEPS).index(step)
    (alone, _), *both = (rank[place] for rank in ranks[1:])
    for drafted, _ in both:
        if isinstance(alone, tuple):
            assert torch.equal(drafted[0], alone[0])
            torch.testing.assert_close(drafted[1], alone[1], rtol=0, atol=1e-5)
        else:
            assert (
                drafted.tolist() == alone.tolist() if torch.is_tensor(alone) else drafted == alone
            )


@pytest.mark.parametrize("step", STEPS)
def test_two_ranks_take_part_in_the_same_collectives(ranks: list[Any], step: str) -> None:
    place = list(STEPS).index(step)
    (_, alone), (_, first), (_, second) = (rank[place] for rank in ranks[1:])
    assert alone == []
    assert first == second
    silent = step in ("all in their prompts", "a schedule that has switched drafting off")
    silent |= bool(ranks[0]) and STEPS[step]["call"] == "propose"
    assert (first == []) == silent
    gathered = [shape for name, shape in first if name == "all_gather"]
    assert len(gathered) == (0 if silent else 1)
    assert all(shape[-1] in (2, 2 * CANDIDATES + 1) for shape in gathered)  # values and ids
