"""The correctness matrix: the same requests without speculation and with it, and what must agree.

A group of requests is answered by the target alone once a session, then on every combination by
random heads (R), by an oracle whose drafts are always right (O), by one whose every third draft
is wrong (M), and by random heads with a lattice that also drafts from the request's own text (L):
one engine for all groups of a suite and the first three, and one for L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import make_job, run, stand_in
from integration_tests.harness.oracle import Recording

NUM_HEADS = 4
BLOCK = NUM_HEADS + 1
PLACES = NUM_HEADS + 3  # of the lattice
SCRIPTED = ("heads", "oracle", "corrupted")
LATTICE = "lattice"
MODES = (*SCRIPTED, LATTICE)
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Request:
    """One request of a group; see `driver.py` for its fields."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    lora: dict[str, Any] | None = None
    abort_after: int | None = None

    def as_job(self) -> dict[str, Any]:
        """The request as the worker reads it."""
        job: dict[str, Any] = {"prompt": self.prompt, "sampling": self.sampling}
        if self.lora is not None:
            job["lora"] = self.lora
        if self.abort_after is not None:
            job["abort_after"] = self.abort_after
        return job


@dataclass
class Group:
    """Requests that are sent together, and what the target alone answered to each."""

    requests: list[Request]
    processors: bool = False  # more than the target's logits decides a token
    repeat: int = 1  # rounds; the first finds no prefix cached
    modes: Sequence[str] = MODES
    extend: bool = False  # record a block more than is asked for, to draft right to the end
    expected: list[dict[str, Any]] = field(default_factory=list)

    def longer(self) -> dict[str, Any]:
        """The batch that asks for a block more of each, and drops none."""
        return {
            "requests": [
                {
                    **request.as_job(),
                    "sampling": request.sampling
                    | {"max_tokens": request.sampling["max_tokens"] + BLOCK},
                    "abort_after": None,
                }
                for request in self.requests
            ]
        }

    def batch(self, mode: str = "heads") -> dict[str, Any]:
        """The batch of a job for this group."""
        return {
            "requests": [request.as_job() for request in self.requests],
            "drafts": mode,
            "processors": self.processors,
            "repeat": self.repeat,
        }


@dataclass
class Suite:
    """Groups that share engines, and longer texts than they ask for, to draft from."""

    target: Path
    folder: Path  # for the heads
    engine: dict[str, Any]
    groups: dict[str, Group]
    free: list[Recording] = field(default_factory=list)
    replies: dict[tuple[str, bool], dict[tuple[str, str], dict[str, Any]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Write the heads, without and with a lattice."""
        self.heads = write_heads(self.target, self.folder / "heads", NUM_HEADS)
        self.lattice = write_heads(self.target, self.folder / "lattice", NUM_HEADS, places=PLACES)

    def record(self, engine: EngineProcess) -> None:
        """Let the target alone answer every group."""
        extended = [group for group in self.groups.values() if group.extend]
        batches = [group.batch() for group in self.groups.values()]
        batches += [group.longer() for group in extended]
        reply = run(engine, make_job(self.target, batches, **self.engine))
        count = len(self.groups)
        for group, batch in zip(self.groups.values(), reply["batches"][:count], strict=True):
            group.expected = batch["outputs"]
        for group, batch in zip(extended, reply["batches"][count:], strict=True):
            for request, output in zip(group.requests, batch["outputs"], strict=True):
                answer = output["completions"][0]["token_ids"]
                self.free.append(Recording(request.prompt, answer))

    def recordings(self) -> list[Recording]:
        """What the oracle drafts from: the longer texts first, then every answer."""
        found = list(self.free)
        for group in self.groups.values():
            for request, output in zip(group.requests, group.expected, strict=True):
                found += [
                    Recording(request.prompt, completion["token_ids"])
                    for completion in output.get("completions", [])
                ]
        return found

    def play(self, engine: EngineProcess, group: str, mode: str) -> dict[str, Any]:
        """The reply to a group drafted for in a mode, on one combination.

        All groups and modes that share its engine are played with it.
        """
        with_lattice = mode == LATTICE
        key = (engine.combo.name, with_lattice)
        if key not in self.replies:
            keys = [
                (name, each)
                for name, asked in self.groups.items()
                for each in asked.modes
                if (each == LATTICE) == with_lattice
            ]
            batches = [self.groups[name].batch(each) for name, each in keys]
            job = make_job(self.target, batches, **self.engine)
            job["llm"]["speculative_config"] = {
                "method": "bpd",
                "model": str(self.lattice if with_lattice else self.heads),
                # Random heads are never sure, so that little would be drafted by default.
                "min_confidence": 0.1,
            }
            if not with_lattice:
                job["drafts"] = stand_in("plugin", self.recordings())
            self.replies[key] = dict(zip(keys, run(engine, job)["batches"], strict=True))
        return self.replies[key][group, mode]


def check_group(group: Group, batch: dict[str, Any]) -> None:
    """Every output of every round is what the target alone gave; nothing was fed wrongly."""
    different = []
    assert len(batch["resident"]) >= group.repeat
    for number, outputs in enumerate(batch["rounds"], 1):
        for request, expected, found in zip(group.requests, group.expected, outputs, strict=True):
            difference = compare(expected, found)
            if difference:
                different.append(f"outputs {number}, {request.name}: {difference}")
    assert not different, "\n".join(different[:50])
    assert batch["faults"] == []


def compare(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """How an output differs from the expected one, in words; nothing if it does not."""
    if "aborted" in expected and "aborted" in found:
        return ""  # how much had come by then depends on the drafts
    if expected.keys() != found.keys():
        return f"expected {expected}, found {found}"
    if "completions" not in expected:
        return "" if expected == found else f"expected {expected}, found {found}"
    if len(expected["completions"]) != len(found["completions"]):
        return f"{len(found['completions'])} completions"
    for left, right in zip(expected["completions"], found["completions"], strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            if left[name] != right[name]:
                return f"{name}: expected {left[name]!r}, found {right[name]!r}"
        difference = compare_rows(left["logprobs"], right["logprobs"])
        if difference:
            return f"logprobs: {difference}"
    difference = compare_rows(expected["prompt_logprobs"], found["prompt_logprobs"])
    return f"prompt_logprobs: {difference}" if difference else ""


def compare_rows(expected: Any, found: Any) -> str:
    """How rows of logprobs differ, in words: in their number, tokens, values or ranks."""
    if expected is None or found is None:
        return "" if expected is found else f"expected {expected}, found {found}"
    if len(expected) != len(found):
        return f"expected {len(expected)} rows, found {len(found)}"
    for place, (left, right) in enumerate(zip(expected, found, strict=True)):
        if left is None or right is None:
            if left is not right:
                return f"row {place}: expected {left}, found {right}"
        elif left.keys() != right.keys() or any(
            not math.isclose(left[token][0], right[token][0], abs_tol=LOGPROB_TOLERANCE)
            or left[token][1] != right[token][1]
            for token in left
        ):
            return f"row {place}: expected {left}, found {right}"
    return ""
