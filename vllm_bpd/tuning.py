"""From measured speeds to a schedule by batch size: the choice `vllm-bpd tune` makes. No vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar


@dataclass(frozen=True)
class Setting:
    """How drafts are made for a batch size on model runner V1."""

    lowest: float  # confidence of a draft, 0..1; 1: draft nothing
    heads: bool  # False: the requests' own texts draft alone

    def __str__(self) -> str:
        """As the table of `vllm-bpd tune` heads its columns."""
        if self.lowest >= 1:
            return "off"
        return f"{'heads' if self.heads else 'text'} {self.lowest:g}"


OFF = Setting(1.0, heads=False)

Key = TypeVar("Key")  # a setting, or a number of drafts


def choose(speeds: Mapping[Key, Sequence[float]], off: Key) -> Key:
    """The setting with the highest median speed; `off` unless another is faster than it.

    `speeds` are tokens a second, one a round. `off`, one of them, drafts nothing.
    """
    medians = {setting: median(rounds) for setting, rounds in speeds.items()}
    best = max(medians, key=lambda setting: medians[setting])
    return best if medians[best] > medians[off] else off


def choose_settings(
    measured: Mapping[int, Mapping[Setting, Sequence[float]]],
) -> dict[int, Setting]:
    """The best setting of every batch size. Once the heads rest, they rest in larger batches."""
    chosen: dict[int, Setting] = {}
    rest = False
    for size in sorted(measured):
        speeds = measured[size]
        if rest:
            speeds = {one: rounds for one, rounds in speeds.items() if not one.heads}
        chosen[size] = choose(speeds, OFF)
        rest = not chosen[size].heads
    return chosen


def as_options(chosen: Mapping[int, Setting], longest: int) -> dict[str, object]:
    """The fields of the speculative config that say `chosen`, for batches up to `longest`."""
    lowest = as_ranges({size: one.lowest for size, one in chosen.items()}, longest)
    options: dict[str, object] = {"min_confidence_per_batch_size": lowest}
    with_heads = as_ranges({size: float(one.heads) for size, one in chosen.items()}, longest)
    if with_heads != [(1, with_heads[0][1], 1.0)]:
        options["heads_up_to_batch_size"] = with_heads[0][1] if with_heads[0][2] else 0
    return options


def ratio(speeds: Mapping[Key, Sequence[float]], setting: Key, off: Key) -> float:
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
