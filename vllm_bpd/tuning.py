"""From measured speeds to a schedule by batch size: the choice `vllm-bpd tune` makes. No vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

# Tokens a second, one a round, by setting: a lowest confidence, or a number of drafts.
Speeds = Mapping[float, Sequence[float]]


def choose(speeds: Speeds, off: float) -> float:
    """The setting with the highest median speed; `off` unless another is faster than it.

    `off` is the setting that drafts nothing, one of `speeds`.
    """
    medians = {setting: median(rounds) for setting, rounds in speeds.items()}
    best = max(medians, key=lambda setting: medians[setting])
    return best if medians[best] > medians[off] else off


def ratio(speeds: Speeds, setting: float, off: float) -> float:
    """Median over the rounds of `setting`'s speed over `off`'s in the same round."""
    pairs = zip(speeds[setting], speeds[off], strict=True)
    return median(one / other for one, other in pairs)


def as_ranges(chosen: Mapping[int, float], longest: int) -> list[tuple[int, int, float]]:
    """(first batch size, last, setting) for every batch size from 1 to `longest`.

    `chosen` maps measured batch sizes to settings. Between two of them the border is their
    geometric mean; neighbouring ranges of one setting become one.
    """
    sizes = sorted(chosen)
    ranges: list[tuple[int, int, float]] = []
    first = 1
    for place, size in enumerate(sizes):
        is_last = place + 1 == len(sizes)
        last = max(size, longest) if is_last else math.isqrt(size * sizes[place + 1])
        if ranges and ranges[-1][2] == chosen[size]:
            ranges[-1] = (ranges[-1][0], last, chosen[size])
        else:
            ranges.append((first, last, chosen[size]))
        first = last + 1
    return ranges
