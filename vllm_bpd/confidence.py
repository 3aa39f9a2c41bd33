"""How sure a draft must be, by the number of requests that run at once. Imports no vLLM.

A drafted token costs its share of a verification and gains a token if it is accepted: it pays
while its probability of acceptance exceeds (cost of one more token in a step / cost of the step) *
tokens a step. That bound rises with the batch, from a few percent for one request towards one when
the machine is busy, so one number does not fit every load. `vllm-bpd tune` measures the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_bpd.errors import HeadsError, shown

# No batch and no text is larger: the engine's own tables count in 32 bits.
LARGEST = 2**31 - 1
_FIELD = "min_confidence_per_batch_size"
_ALMOST_FREE = 0.1  # lowest confidence where verification costs little
_EXPECTED = "expected entries [first batch size, last, lowest confidence from 0 to 1]"


@dataclass(frozen=True)
class ConfidenceSchedule:
    """Lowest confidence by batch size. The last range goes on for all larger batches."""

    last_sizes: tuple[int, ...]  # of each range, ascending
    lowest: tuple[float, ...]  # of each range, 0..1; 1: draft nothing
    heads_up_to: int | None = None  # in larger batches the heads rest, unless a user says otherwise
    sampled_up_to: int | None = None  # in larger batches only greedy requests draft

    def at(self, batch_size: int) -> float:
        """The lowest confidence for a batch of `batch_size` requests."""
        for last, lowest in zip(self.last_sizes, self.lowest, strict=True):
            if batch_size <= last:
                return lowest
        return self.lowest[-1]


# On a CPU a verified token soon costs its full share. Measured on two cores (docs/speed.md), which
# are busy early; with more of them drafts pay for longer than this lets them. Where a request
# samples, the engine passes over the vocabulary several times for each draft, and keeps fewer.
ON_CPU = ConfidenceSchedule((2, 5, 11, 12), (0.1, 0.15, 0.4, 0.7), heads_up_to=11, sampled_up_to=5)


def schedule(
    entries: Sequence[Sequence[float]] | None, lowest: float | None, device_type: str
) -> ConfidenceSchedule:
    """What holds with these options, each None if not given, on a device of that type."""
    if entries is None and lowest is None and device_type == "cpu":
        return ON_CPU
    return parse_schedule(entries, _ALMOST_FREE if lowest is None else lowest)


def parse_schedule(entries: Sequence[Sequence[float]] | None, default: float) -> ConfidenceSchedule:
    """The schedule that `entries` say, or `default` for every batch size.

    Raises HeadsError, one line, unless ranges start at 1 and follow each other without a gap.
    """
    if entries is None:
        return ConfidenceSchedule((1,), (default,))
    if not entries:
        raise HeadsError(f"{_FIELD}: found no entry; {_EXPECTED}, or leave it out")
    last_sizes: list[int] = []
    lowest: list[float] = []
    following = 1
    for entry in entries:
        if len(entry) != 3:
            raise HeadsError(f"{_FIELD}: found {shown(list(entry))}; {_EXPECTED}")
        first, last, confidence = entry
        if first != following or not first <= last <= LARGEST or last != int(last):
            raise HeadsError(
                f"{_FIELD}: found a range from {shown(first)} to {shown(last)}; expected one that "
                f"starts at {following}: ranges start at 1, follow each other and end at {LARGEST} "
                "at most"
            )
        if not 0 <= confidence <= 1:
            raise HeadsError(f"{_FIELD}: found confidence {shown(confidence)}; {_EXPECTED}")
        last_sizes.append(int(last))
        lowest.append(float(confidence))
        following = int(last) + 1
    return ConfidenceSchedule(tuple(last_sizes), tuple(lowest))
