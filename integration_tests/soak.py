"""`make soak`: mixed traffic at random against a server, for an hour unless told otherwise.

A small float32 target answers a catalogue of requests without speculation first. Then a server
with heads, a lattice and a draft vocabulary gets them at random, in waves of few and many at once
(the heads draft by how many run), some streamed, some dropped half-way, between sampled and refused
ones, in a cache so small that requests are preempted. Every answer has to be the recorded one.
Adapters are left out: on a CPU vLLM itself answers for the base with one (test_matrix_scheduling).
Figures go to a JSON file as it runs; the exit status says whether all was well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from integration_tests.harness.combos import COMBOS
from integration_tests.harness.heads import write_chain_heads
from integration_tests.harness.server import Server, serving
from integration_tests.harness.targets import TARGETS, TEXT_VOCAB, write_target
from integration_tests.harness.traffic import (
    CONTEXT,
    KINDS,
    REFUSAL,
    REFUSED,
    SAMPLED,
    Ask,
    alike,
    broken,
    catalogue,
    sampled,
    send,
)

OPTIONS = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16",
           "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "40",
           "--block-size", "32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
           "--structured-outputs-config",
           '{"backend": "xgrammar", "disable_any_whitespace": true}']  # fmt: skip
NUM_HEADS, PLACES = 4, 6
DRAFT_VOCAB = TEXT_VOCAB * 3 // 4
PER_KIND = 12
CLIENTS = 16
WAVE_SECONDS = 4  # so long the same number of clients send
NOTE_SECONDS = 20
# From there on every kind must have been sent, and requests preempted.
LONG_MINUTES = 2.0
# Memory is settled by then; from there on it may grow by no more than this.
SETTLED_MINUTES = 3.0
GROWTH_BYTES = 100 << 20
Recorded = tuple[Ask, dict[bool, Any]]  # and what came at once, and streamed


class Soak:
    """The traffic and its figures."""

    def __init__(self, server: Server, answers: list[Recorded], output: Path) -> None:
        """Begin with nothing sent."""
        self.server = server
        self.client = connect(server)
        self.answers = answers
        self.output = output
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.seeds = iter(range(1 << 40))
        self.sent: Counter[str] = Counter()
        self.compared = 0
        self.dropped = 0
        self.mismatches: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.dead: list[str] = []  # what clients ended of
        self.resident: list[tuple[float, int]] = []
        self.started = time.monotonic()

    def minutes(self) -> float:
        """Since the traffic began."""
        return (time.monotonic() - self.started) / 60

    def one(self, seed: int) -> None:
        """Send one request at random and compare its answer."""
        draw = random.Random(seed)
        stream = draw.random() < 0.5
        drop_after = draw.randrange(12) if stream and draw.random() < 0.3 else None
        ask, recorded = draw.choice(self.answers)
        if draw.random() < 0.3:
            ask, recorded = sampled(draw), {}
        found: Any = "refused"
        try:
            found = send(self.client, ask, stream, drop_after)
        except APIError as error:
            if ask.kind not in REFUSED or REFUSAL not in str(error):
                with self.lock:
                    self.errors.append(f"{ask.kind}: {error}")
                return
        wrong = self.difference(ask, recorded, stream, found)
        with self.lock:
            self.sent[ask.kind] += 1
            self.dropped += found is None
            self.compared += bool(recorded) and found is not None
            if wrong:
                asked = {"kind": ask.kind, "stream": stream, "prompt": ask.prompt}
                self.mismatches.append({**asked, **wrong})

    @staticmethod
    def difference(ask: Ask, recorded: dict[bool, Any], stream: bool, found: Any) -> dict[str, Any]:
        """What is wrong with an answer; nothing if it is right, or was dropped."""
        if found is None:
            return {}
        if ask.kind in REFUSED:
            return {} if found == "refused" else {"expected": "refused", "found": found}
        if ask.kind in SAMPLED:
            wrong = broken(ask, found)
            return {"expected": "its structure", "found": wrong} if wrong else {}
        expected = recorded[stream]
        return {} if alike(expected, found) else {"expected": expected, "found": found}

    def keep_sending(self, number: int) -> None:
        """What client `number` does until told to stop: one request after another in its waves."""
        try:
            while not self.stop.is_set():
                wave = random.Random(int(self.minutes() * 60 / WAVE_SECONDS))
                if number >= wave.randint(1, CLIENTS):
                    self.stop.wait(0.2)
                    continue
                with self.lock:
                    seed = next(self.seeds)
                self.one(seed)
                if self.server.process.poll() is not None or len(self.errors) > 100:
                    self.stop.set()
        except BaseException as error:
            self.stop.set()
            with self.lock:
                self.dead.append(repr(error))
            raise

    def run(self, minutes: float) -> None:
        """Let clients send until the time is over, or one of them ends."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for number in range(CLIENTS):
                pool.submit(self.keep_sending, number)
            while self.minutes() < minutes and not self.stop.wait(NOTE_SECONDS):
                self.note()
            self.stop.set()
        self.note()

    def counters(self) -> dict[str, float]:
        """What the server has counted; zeros once it has ended."""
        metrics = self.server.metrics() if self.server.process.poll() is None else {}
        names = {
            "drafts": "spec_decode_num_drafts_total",
            "drafted": "spec_decode_num_draft_tokens_total",
            "accepted": "spec_decode_num_accepted_tokens_total",
            "preemptions": "num_preemptions_total",
        }
        return {name: metrics.get(counter, 0.0) for name, counter in names.items()}

    def settled(self) -> list[int]:
        """Memory once it is settled, if it was measured at least twice then."""
        found = [bytes_ for minute, bytes_ in self.resident if minute >= SETTLED_MINUTES]
        return found if len(found) > 1 else []

    def figures(self) -> dict[str, Any]:
        """All figures so far."""
        counted, settled = self.counters(), self.settled()
        drafts, accepted = counted["drafts"], counted["accepted"]
        return {
            "minutes": round(self.minutes(), 2),
            "requests": sum(self.sent.values()),
            "by kind": dict(sorted(self.sent.items())),
            "answers compared": self.compared,
            "streams dropped": self.dropped,
            "mismatches": self.mismatches[:20],
            "number of mismatches": len(self.mismatches),
            "errors": self.errors[:20],
            "clients that ended": self.dead,
            "server alive": self.server.process.poll() is None,
            **counted,
            "mean accepted block": round(1 + accepted / drafts, 3) if drafts else None,
            "MiB, settled": [round(b / 2**20) for b in (settled[:1] + settled[-1:])]
            or f"not checked: measured twice only after {SETTLED_MINUTES:g} minutes",
            "MiB, most": round(max([b for _, b in self.resident], default=0) / 2**20),
        }

    def note(self) -> None:
        """Measure memory and write the figures."""
        self.resident.append((self.minutes(), self.server.resident()))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.figures(), indent=2) + "\n", encoding="utf-8")

    def verdict(self) -> list[str]:
        """What was not well, or was not tried."""
        wrong = []
        if self.dead:
            wrong.append(f"{len(self.dead)} clients ended: {self.dead[0]}")
        if self.mismatches:
            wrong.append(f"{len(self.mismatches)} answers differ from the recorded ones")
        if self.errors:
            wrong.append(f"{len(self.errors)} requests failed: {self.errors[0]}")
        if self.server.process.poll() is not None:
            wrong.append("the server ended")
        settled = self.settled()
        if settled and settled[-1] - settled[0] > GROWTH_BYTES:
            wrong.append(f"memory grew by {(settled[-1] - settled[0]) >> 20} MiB")
        counted = self.counters() | {"answers compared": self.compared}
        if self.minutes() < LONG_MINUTES:
            del counted["preemptions"]
        else:
            wrong += [f"never sent: {kind}" for kind in KINDS if not self.sent[kind]]
            counted["streams dropped"] = self.dropped
        return wrong + [f"{name}: none" for name, count in counted.items() if not count]


def connect(server: Server) -> OpenAI:
    """A client that does not try again by itself: a failure is a failure."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)


def record(server: Server) -> list[Recorded]:
    """What the target alone answers to the whole catalogue, eight at a time."""
    client = connect(server)

    def answers(ask: Ask) -> Recorded:
        at_once = send(client, ask, False)
        # A call cut by its length limit is given in pieces, but not at once.
        return ask, {False: at_once, True: send(client, ask, True) if ask.is_chat else at_once}

    with ThreadPoolExecutor(8) as pool:
        recorded = list(pool.map(answers, catalogue(PER_KIND)))
    if "spec_decode_num_drafts_total" in server.metrics():
        raise ValueError("the answers to compare with were recorded with speculation")
    return recorded


def main() -> None:
    """Record, then soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; default 60")
    output = Path("build/soak.json")
    parser.add_argument("--output", type=Path, default=output, help=f"figures; default {output}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target = write_target(TARGETS["settled"], folder / "target")
        heads = write_chain_heads(target, folder / "heads", NUM_HEADS, PLACES, DRAFT_VOCAB)
        with serving(COMBOS[0], target, folder / "plain.log", OPTIONS) as server:
            answers = record(server)
        options = [*OPTIONS, "--spec-method", "bpd", "--spec-model", str(heads)]
        log = arguments.output.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with serving(COMBOS[0], target, log, options) as server:
            soak = Soak(server, answers, arguments.output)
            soak.run(arguments.minutes)
            wrong = soak.verdict()
    print(arguments.output.read_text(encoding="utf-8"))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
