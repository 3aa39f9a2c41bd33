"""`make soak`: mixed traffic at random against a server, for an hour unless told otherwise.

A small float32 target answers a catalogue of requests without speculation first. Then a server
with heads gets them at random, some streamed, some dropped half-way, between sampled ones, in a
cache so small that requests are preempted. Every answer has to be the recorded one. Figures go to
a JSON file as it runs; the exit status says whether all was well.
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

from openai import APIConnectionError, APIError, OpenAI

from integration_tests.harness.combos import COMBOS
from integration_tests.harness.heads import write_chain_heads
from integration_tests.harness.server import Server, serving
from integration_tests.harness.targets import TARGETS, write_target
from integration_tests.harness.traffic import Ask, catalogue, sampled, send

OPTIONS = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16",
           "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "40",
           "--block-size", "32"]  # fmt: skip
PER_KIND = 12
CLIENTS = 12
NOTE_SECONDS = 20
# Memory is settled by then; from there on it may grow by no more than this.
SETTLED_MINUTES = 3.0
GROWTH_BYTES = 100 << 20


class Soak:
    """The traffic and its figures."""

    def __init__(self, server: Server, answers: list[tuple[Ask, Any]], output: Path) -> None:
        """Begin with nothing sent."""
        self.server = server
        self.client = connect(server)
        self.answers = answers
        self.output = output
        self.lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.dropped = 0
        self.mismatches: list[dict[str, Any]] = []
        self.errors: list[str] = []
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
        ask, expected = draw.choice(self.answers)
        if draw.random() < 0.2:
            ask, expected = sampled(draw), None
        try:
            found = send(self.client, ask, stream, drop_after)
        except (APIError, APIConnectionError) as error:
            with self.lock:
                self.errors.append(f"{ask.kind}: {error}")
            return
        with self.lock:
            self.sent[ask.kind] += 1
            self.dropped += found is None
            if expected is not None and found is not None and found != expected:
                difference = {"kind": ask.kind, "stream": stream, "prompt": ask.prompt}
                self.mismatches.append({**difference, "expected": expected, "found": found})

    def run(self, minutes: float) -> None:
        """Keep CLIENTS requests under way until the time is over."""
        seeds = iter(range(1 << 40))
        stop = threading.Event()

        def client() -> None:
            while not stop.is_set():
                with self.lock:
                    seed = next(seeds)
                self.one(seed)
                if self.server.process.poll() is not None or len(self.errors) > 100:
                    stop.set()

        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in range(CLIENTS):
                pool.submit(client)
            while self.minutes() < minutes and not stop.wait(NOTE_SECONDS):
                self.note()
            stop.set()
        self.note()

    def figures(self) -> dict[str, Any]:
        """All figures so far."""
        metrics = self.server.metrics() if self.server.process.poll() is None else {}
        drafts = metrics.get("spec_decode_num_drafts_total", 0.0)
        accepted = metrics.get("spec_decode_num_accepted_tokens_total", 0.0)
        settled = [bytes_ for minute, bytes_ in self.resident if minute >= SETTLED_MINUTES]
        return {
            "minutes": round(self.minutes(), 2),
            "requests": sum(self.sent.values()),
            "by kind": dict(sorted(self.sent.items())),
            "streams dropped": self.dropped,
            "mismatches": self.mismatches[:20],
            "number of mismatches": len(self.mismatches),
            "errors": self.errors[:20],
            "server alive": self.server.process.poll() is None,
            "drafts": drafts,
            "accepted": accepted,
            "mean accepted block": round(1 + accepted / drafts, 3) if drafts else None,
            "preemptions": metrics.get("num_preemptions_total", 0.0),
            "MiB, settled": [round(b / 2**20) for b in (settled[:1] + settled[-1:])],
            "MiB, most": round(max([b for _, b in self.resident], default=0) / 2**20),
        }

    def note(self) -> None:
        """Measure memory and write the figures."""
        self.resident.append((self.minutes(), self.server.resident()))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.figures(), indent=2) + "\n", encoding="utf-8")

    def verdict(self) -> list[str]:
        """What was not well."""
        settled = [bytes_ for minute, bytes_ in self.resident if minute >= SETTLED_MINUTES]
        wrong = []
        if self.mismatches:
            wrong.append(f"{len(self.mismatches)} answers differ from the recorded ones")
        if self.errors:
            wrong.append(f"{len(self.errors)} requests failed: {self.errors[0]}")
        if self.server.process.poll() is not None:
            wrong.append("the server ended")
        if settled and settled[-1] - settled[0] > GROWTH_BYTES:
            wrong.append(f"memory grew by {(settled[-1] - settled[0]) >> 20} MiB")
        return wrong


def connect(server: Server) -> OpenAI:
    """A client that does not try again by itself: a failure is a failure."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)


def record(server: Server) -> list[tuple[Ask, Any]]:
    """What the target alone answers to the whole catalogue, eight at a time."""
    client = connect(server)
    asks = catalogue(PER_KIND)
    with ThreadPoolExecutor(8) as pool:
        return list(zip(asks, pool.map(lambda ask: send(client, ask, False), asks), strict=True))


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
        heads = write_chain_heads(target, folder / "heads", 4)
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
