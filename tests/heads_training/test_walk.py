"""The walk against a step-by-step engine that knows nothing of rows and matrices."""

from __future__ import annotations

import pytest
import torch

from heads_training.walk import WalkCounts, walk


def engine(
    answers: list[list[int]], drafts: list[list[list[int]]], k: int
) -> tuple[int, list[int]]:
    """Serve every answer greedily: draft k-1 tokens behind the newest, verify, accept, go on."""
    steps, accepted_at = 0, [0] * (k - 1)
    for answer, own_drafts in zip(answers, drafts, strict=True):
        said = answer[:1]  # the prompt's own step samples one token, without drafts
        while len(said) < len(answer):
            proposal = own_drafts[len(said) - 1][: k - 1]
            steps += 1
            for place, token in enumerate(proposal):
                if len(said) == len(answer) or token != answer[len(said)]:
                    break
                accepted_at[place] += 1
                said.append(token)
            if len(said) < len(answer):
                said.append(answer[len(said)])  # the target's own token
    return steps, accepted_at


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_walk_equals_the_engine(k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 3, 40, 1, 7, 64]
    answers = [torch.randint(2, (n,), generator=generator).tolist() for n in lengths]
    drafts = [torch.randint(2, (n, 4), generator=generator).tolist() for n in lengths]
    match = [
        [j + 1 + i < len(answer) and own[j][i] == answer[j + 1 + i] for i in range(4)]
        for answer, own in zip(answers, drafts, strict=True)
        for j in range(len(answer))
    ]
    counts = walk(torch.tensor(match), lengths, k - 1)
    assert (counts.steps, counts.accepted_at) == engine(answers, drafts, k)


def test_k_hat() -> None:
    assert WalkCounts(4, [3, 1]).k_hat == 2.0
    assert WalkCounts().k_hat == 1.0
    assert walk(torch.ones(1, 2, dtype=torch.bool), [1], 2).steps == 0
