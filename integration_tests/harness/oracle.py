"""Drafting from recorded text, and the counters such drafting must give: plain Python, no engine.

A recording is a prompt and the text the target gave for it. Drafts read from a recording are
always right; a corrupted recording has every `corrupt_every`-th token of the answer wrong. So the
walk of every request, and each of the engine's speculative counters, can be worked out by hand.

What the engine counts (`vllm/v1/core/sched/scheduler.py`, the same in 0.32 and 0.33):

- The token that ends the prefill comes with no draft. Every later step verifies a draft of up to
  `num_speculative_tokens`, and is counted only if at least one token was drafted.
- A draft counts when it is verified, not when it is made: one made in the step that finishes its
  request never counts.
- A draft is cut so that the request cannot pass `max_model_len`, but not for `max_tokens`. The
  accepted tokens of the last step count in full, even those past `max_tokens` that are dropped.
- Under asynchronous scheduling a step is planned while the one before still runs, as if all its
  drafts were accepted: the cut for `max_model_len` comes earlier, and a request with no room left
  on that assumption sits the step out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recording:
    """A prompt and the text the target gave for it, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Counts:
    """The engine's speculative counters: drafts, drafted and accepted tokens, and by position."""

    num_speculative_tokens: int
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with a zero for each position."""
        self.per_position = self.per_position or [0] * self.num_speculative_tokens

    def verify(self, drafted: int, accepted: int) -> None:
        """Count one verified draft."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(accepted):
            self.per_position[position] += 1

    def as_reported(self) -> dict[str, object]:
        """The counters in the form the worker reports them."""
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "per_position": self.per_position,
        }


def is_wrong(position: int, corrupt_every: int | None) -> bool:
    """Whether the draft for answer position `position` (from 0) is made wrong."""
    return corrupt_every is not None and position % corrupt_every == corrupt_every - 1


def find_recording(prefix: Sequence[int], recordings: Sequence[Recording]) -> Recording | None:
    """The recording whose text begins with all of `prefix`, prompt included; else none."""
    wanted = list(prefix)
    for recording in recordings:
        text = recording.prompt + recording.answer
        if len(wanted) >= len(recording.prompt) and text[: len(wanted)] == wanted:
            return recording
    return None


def runs_past(prefix: Sequence[int], recordings: Sequence[Recording]) -> bool:
    """Whether `prefix` is some recording's whole text and more."""
    wanted = list(prefix)
    texts = (recording.prompt + recording.answer for recording in recordings)
    return any(len(wanted) > len(text) and wanted[: len(text)] == text for text in texts)


def continuation(
    prefix: Sequence[int],
    recordings: Sequence[Recording],
    count: int,
    corrupt_every: int | None = None,
) -> list[int]:
    """The `count` tokens recorded after `prefix`, wrong ones where corrupted.

    A prefix with no recording, and places past the end of one, give token 0.
    """
    recording = find_recording(prefix, recordings)
    if recording is None:
        return [0] * count
    first = len(prefix) - len(recording.prompt)
    drafts = []
    for position in range(first, first + count):
        if position >= len(recording.answer):
            drafts.append(0)
            continue
        right = recording.answer[position]
        drafts.append((0 if right else 1) if is_wrong(position, corrupt_every) else right)
    return drafts


def chain(
    prefix: Sequence[int],
    successors: Sequence[Sequence[int]],
    count: int,
    corrupt_every: int | None = None,
) -> list[int]:
    """`count` tokens from the last of `prefix` on, each the likeliest successor of the one before.

    The least likely one where corrupted: for answers that are sampled, and so not recorded.
    """
    drafts: list[int] = []
    last = prefix[-1]
    for position in range(len(prefix), len(prefix) + count):
        likeliest, least = successors[last]
        last = least if is_wrong(position, corrupt_every) else likeliest
        drafts.append(last)
    return drafts


def draft_room(tokens: int, wanted: int, max_model_len: int) -> int:
    """How many of `wanted` drafts the scheduler keeps for a request that has `tokens` tokens."""
    return min(wanted, max_model_len - tokens - 1)


def accepted_run(done: int, drafted: int, corrupt_every: int | None) -> int:
    """How many drafts after `done` answer tokens are right, up to the first wrong one."""
    run = 0
    while run < drafted and not is_wrong(done + run, corrupt_every):
        run += 1
    return run


@dataclass(frozen=True)
class Walk:
    """How requests are walked: what the engine was told, and how drafts are corrupted."""

    num_speculative_tokens: int
    max_tokens: int
    max_model_len: int
    corrupt_every: int | None = None
    async_scheduling: bool = False
    # How many tokens a dynamic schedule drafts, where that is one number throughout.
    scheduled: int | None = None


def hand_count(recordings: Sequence[Recording], walk: Walk) -> Counts:
    """The engine's counters for generating from every recorded prompt with recorded drafts."""
    counts = Counts(walk.num_speculative_tokens)
    for recording in recordings:
        walk_request(counts, recording, walk)
    return counts


def count_blocks(
    blocks: Sequence[tuple[Sequence[int], Sequence[int]]],
    recordings: Sequence[Recording],
    walk: Walk,
) -> Counts:
    """The engine's counters for blocks that heads drafted, each behind a request's tokens so far.

    A block counts as far as there is room, if its request goes on; its first tokens that the
    recording says, too, are accepted.
    """
    counts = Counts(walk.num_speculative_tokens)
    for prefix, drafts in blocks:
        recording = find_recording(prefix, recordings)
        done = 0 if recording is None else len(prefix) - len(recording.prompt)
        room = draft_room(len(prefix), len(drafts), walk.max_model_len)
        # Below one: part of a prompt, for which a runner may draft what nobody reads.
        if recording is None or done < 1 or done >= walk.max_tokens or room < 1:
            continue
        said = recording.answer[done : done + room]
        if len(said) < room:
            raise ValueError("the recording is too short to tell which drafts are right")
        pairs = enumerate(zip(drafts, said, strict=False))
        counts.verify(room, next((place for place, (a, b) in pairs if a != b), room))
    return counts


def walk_request(counts: Counts, recording: Recording, walk: Walk) -> None:
    """Walk one request step by step, adding each verified draft to `counts`."""
    prompt = len(recording.prompt)
    limit = walk.max_model_len
    wanted = walk.num_speculative_tokens if walk.scheduled is None else walk.scheduled
    done = 1
    # Tokens the request would have had before this step, had all earlier drafts been accepted.
    assumed = prompt + 1
    while done < walk.max_tokens and prompt + done < limit:
        drafted = draft_room(assumed, wanted, limit)
        if drafted < 0:
            # Planned with no room: it waits for the running step and is planned exactly.
            drafted = draft_room(prompt + done, wanted, limit)
        if done + drafted > len(recording.answer):
            raise ValueError("the recording is too short to tell which drafts are right")
        accepted = accepted_run(done, drafted, walk.corrupt_every)
        if drafted > 0:
            counts.verify(drafted, accepted)
        assumed = prompt + done + 1 + (drafted if walk.async_scheduling else accepted)
        done += accepted + 1
