"""`vllm_bpd.lattice` as its docstring reads: plain Python, one text, one place at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from vllm_bpd.lattice import (
    COUNT,
    FLOOR,
    LONGEST_MATCH,
    MATCH,
    MATCHES,
    NONE,
    NUM_WEIGHTS,
    SCALE,
    SHARE,
)

Head = list[tuple[int, float]]  # ids and log probabilities, best first
Behind = list[tuple[int, int]]  # tokens behind matches, and the matches' lengths


def run_at(text: list[int], place: int) -> int:
    """How many tokens up to `place` equal the last ones of `text`; -1 equals nothing."""
    for run in range(min(place + 1, LONGEST_MATCH), 0, -1):
        ends = text[place + 1 - run : place + 1]
        if ends == text[len(text) - run :] and -1 not in ends:
            return run
    return 0


def matches_of(text: list[int]) -> Behind:
    """Longest first, the latest first among equals."""
    runs = [(run_at(text, place), place) for place in range(len(text) - 1)]
    found = sorted((found for found in runs if found[0]), reverse=True)
    return [(text[place + 1], run) for run, place in found[:MATCHES]]


@dataclass(frozen=True)
class Candidate:
    token: int
    logp: float | None  # None: the head does not name it
    run: int
    count: int
    share: float

    def score(self, weights: list[float]) -> float:
        head = weights[FLOOR] if self.logp is None else weights[SCALE] * self.logp
        count = weights[COUNT] * math.log(self.count) if self.count else 0.0
        return head + weights[MATCH + self.run] + count + weights[SHARE] * self.share


def candidates_of(head: Head, behind: Behind) -> list[Candidate]:
    """The head's tokens, then those behind matches that it does not name, each once."""
    logp = dict(head)
    longest = [token for token, run in behind if run == behind[0][1]]
    found = []
    for token in dict.fromkeys([*logp, *(token for token, _ in behind)]):
        runs = [run for other, run in behind if other == token]
        run = max(runs, default=0)
        share = longest.count(token) / len(longest) if run and run == behind[0][1] else 0.0
        found.append(Candidate(token, logp.get(token), run, runs.count(run), share))
    return found


@dataclass(frozen=True)
class Choice:
    token: int
    confidence: float
    margin: float  # by how much its score beats the second best
    own: bool  # it is the head's first choice


NOTHING = Choice(0, 0.0, math.inf, False)


def choose_from(found: list[Candidate], longest: int, weights: list[float]) -> Choice:
    if not found:
        return NOTHING
    scores = [candidate.score(weights) for candidate in found]
    best = scores.index(max(scores))
    total = sum(math.exp(score - scores[best]) for score in [*scores, weights[NONE + longest]])
    others = [score for i, score in enumerate(scores) if i != best]
    own = best == 0 and found[0].logp is not None
    return Choice(found[best].token, 1 / total, scores[best] - max(others, default=-math.inf), own)


def draft_of(text: list[int], heads: list[Head], weights: list[list[float]]) -> list[Choice]:
    """A choice for each row of `weights`; an empty `text` drafts from the heads alone."""
    choices: list[Choice] = []
    for place, row in enumerate(weights):
        said = text + [choice.token for choice in choices] if text else []
        behind = matches_of(said)
        head = heads[place] if place < len(heads) else []
        longest = behind[0][1] if behind else 0
        choices.append(choose_from(candidates_of(head, behind), longest, row))
    return choices


def random_weights(places: int, seed: int) -> Tensor:
    """float32 [P, F], none of them special, `SCALE` above 0."""
    generator = torch.Generator().manual_seed(seed)
    weights_PF = torch.randn(places, NUM_WEIGHTS, generator=generator) * 2
    weights_PF[:, SCALE] = weights_PF[:, SCALE].abs() + 0.1
    weights_PF[:, FLOOR] -= 2
    return weights_PF


def continuing_weights(places: int) -> Tensor:
    """float32 [P, F]: heads count as they are, and any match outweighs them, longer ones more."""
    weights_PF = torch.zeros(places, NUM_WEIGHTS)
    weights_PF[:, SCALE], weights_PF[:, FLOOR] = 1, -10
    weights_PF[:, MATCH : MATCH + LONGEST_MATCH + 1] = torch.arange(LONGEST_MATCH + 1.0) * 20
    return weights_PF


def random_heads_say(
    rows: int, heads: int, count: int, vocab: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Ids int64 [B, K, M], distinct ones, and log probabilities float32 that sum to less than 1.

    Where the vocabulary has fewer than M ids, id -1 of probability 0 fills up, as in serving.
    """
    generator = torch.Generator().manual_seed(seed)
    real = min(count, vocab)
    logits = 2 * torch.randn(rows, heads, vocab + 1, generator=generator)
    logp, columns = logits.log_softmax(-1)[..., :vocab].topk(real)
    fill = (0, count - real)
    logp = torch.nn.functional.pad(logp, fill, value=-math.inf)
    return torch.nn.functional.pad(columns, fill, value=-1), logp


def as_heads(ids_KM: Tensor, logp_KM: Tensor) -> list[Head]:
    """One request's heads as plain lists, without what fills up."""
    return [
        [(token, value) for token, value in zip(ids, logp, strict=True) if token >= 0]
        for ids, logp in zip(ids_KM.tolist(), logp_KM.tolist(), strict=True)
    ]


@st.composite
def texts(draw: st.DrawFn, min_size: int = 1, vocab: int = 3) -> list[int]:
    """Texts of few different tokens, so that matches are many; some repeat one phrase."""
    tokens = st.integers(0, vocab - 1)
    start = draw(st.lists(tokens, min_size=min_size, max_size=24))
    phrase = draw(st.lists(tokens, max_size=6))
    return start + phrase * draw(st.integers(0, 5))
