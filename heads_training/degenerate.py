"""Answers that are no model of good text: loops, answers cut off, empty ones.

Greedy decoding of small targets likes to end in a loop. A loop is easy to draft, so many of them
make heads look better offline than they are; they are counted always and dropped on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from heads_training.records import Record

_LOOP_TOKENS = 48  # an answer's last tokens that are looked at to call it a loop
_LOOP_PERIODS = 16  # longest period, tokens, of a loop


def is_loop(answer_ids: list[int]) -> bool:
    """Whether an answer ends in a run of one short period, as greedy decoding likes to."""
    tail = answer_ids[-_LOOP_TOKENS:]
    return len(tail) == _LOOP_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, _LOOP_PERIODS + 1)
    )


def degeneracy(record: Record) -> str | None:
    """`empty`, `loop` (cut off at the token limit while repeating itself), `cut` (cut off at the
    token limit, but not repeating) or None for an answer that came to its own end."""
    if not record.answer_token_ids:
        return "empty"
    if record.finish_reason != "length":
        return None
    return "loop" if is_loop(record.answer_token_ids) else "cut"


def count_degenerate(records: Iterable[Record]) -> Counter[str]:
    """How many records there are (`answers`), their tokens, and how many of each degeneracy."""
    counts: Counter[str] = Counter(answers=0, answer_tokens=0, empty=0, loop=0, cut=0)
    for record in records:
        counts["answers"] += 1
        counts["answer_tokens"] += len(record.answer_token_ids)
        kind = degeneracy(record)
        if kind is not None:
            counts[kind] += 1
    return counts
