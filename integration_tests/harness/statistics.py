"""Whether sampled tokens follow the target's distribution: plain numbers, no engine.

Shape suffixes: V vocabulary, P the token before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# A cell needs this many expected samples for the chi-square approximation to hold.
FEWEST_EXPECTED = 5.0


def bigram_logits(target: Path) -> Any:
    """Logits of every next token after every token, float64 [P, V], of a `bigram` target.

    Its layers add nothing to the embedding, so they are the norm and the LM head alone.
    """
    import torch
    from safetensors.torch import load_file

    tensors = {k: v.double() for k, v in load_file(target / "model.safetensors").items()}
    embedding_PD = tensors["model.embed_tokens.weight"]
    rms_P = (embedding_PD.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    hidden_PD = embedding_PD / rms_P * tensors["model.norm.weight"]
    logits: torch.Tensor = hidden_PD @ tensors["lm_head.weight"].T
    return logits


def distribution(logits_PV: Any, sampling: dict[str, Any]) -> Any:
    """Probabilities [P, V] under `temperature`, `top_k` and `top_p`, as vLLM defines them."""
    import torch

    logits_PV = logits_PV / sampling["temperature"]
    ordered_PV, places_PV = logits_PV.sort(dim=-1, descending=True)
    if "top_k" in sampling:
        ordered_PV[:, sampling["top_k"] :] = -math.inf
    probabilities_PV = ordered_PV.softmax(dim=-1)
    if "top_p" in sampling:
        before_PV = probabilities_PV.cumsum(dim=-1) - probabilities_PV
        probabilities_PV[before_PV >= sampling["top_p"]] = 0.0
        probabilities_PV /= probabilities_PV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities_PV).scatter(-1, places_PV, probabilities_PV)


def count_pairs(texts: Iterable[Sequence[int]], vocab: int) -> list[list[int]]:
    """How often each token [V] followed each token [P]."""
    counts = [[0] * vocab for _ in range(vocab)]
    for text in texts:
        for before, after in itertools.pairwise(text):
            counts[before][after] += 1
    return counts


def chi_square(counts: Sequence[Sequence[int]], probabilities: Sequence[Sequence[float]]) -> float:
    """How far counts lie from what is expected, in standard deviations of a normal variable.

    Chi-square over all rows, turned into a normal score by Wilson and Hilferty's cube root. Cells
    of few expected samples are put together; infinite if what cannot come came.
    """
    statistic, freedom = 0.0, 0
    for row, expected_row in zip(counts, probabilities, strict=True):
        total = sum(row)
        rare_found, rare_expected, cells = 0, 0.0, 0
        for found, probability in zip(row, expected_row, strict=True):
            expected = total * probability
            if probability == 0.0 and found:
                return math.inf
            if expected < FEWEST_EXPECTED:
                rare_found, rare_expected = rare_found + found, rare_expected + expected
                continue
            statistic += (found - expected) ** 2 / expected
            cells += 1
        if rare_expected >= FEWEST_EXPECTED:
            statistic += (rare_found - rare_expected) ** 2 / rare_expected
            cells += 1
        freedom += max(cells - 1, 0)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
