"""Where drafting's time goes on a CPU, and how it grows: CPU milliseconds of one thread.

Random weights in the shapes of the shipped heads, then with more and fewer requests, heads and
scored ids. CPU time, so another job does not count; only ratios mean anything on another machine.

Shape suffixes: B requests, D hidden size, J joint hidden size, K heads, N = B * K rows, V scored
ids, M candidates.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from statistics import median

import torch
from torch.nn.functional import linear

from vllm_bpd.arguments import at_least_one, output_file, run_command
from vllm_bpd.few_rows import MOST_ROWS, RoundedWeight
from vllm_bpd.lattice import CANDIDATES

HIDDEN = 576
BATCHES = (1, 2, 8, 32)
_LOGITS_SPREAD = 4.0  # standard deviation
_FLUSHED_BYTES = 128 << 20  # more than any cache holds


@dataclass(frozen=True)
class Shape:
    """What is drafted for, and by what; the shipped heads'."""

    requests: int = 1
    heads: int = 2
    units: int = 560  # hidden, of each head
    scored: int = 8192

    def grown(self) -> dict[str, list[Shape]]:
        """Other shapes, by what differs."""
        return {
            "requests": [replace(self, requests=n) for n in (1, 2, 4, 8, 16, 32, 64)],
            "heads": [replace(self, heads=n) for n in (1, 2, 4, 8)],
            "scored": [replace(self, scored=n) for n in (2048, 4096, 8192, 16384, 32768, 49152)],
        }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafting", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--rounds", type=at_least_one, default=30, help="of each part; the median counts"
    )
    parser.add_argument("--output", type=output_file, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = arguments.rounds
    found = {str(size): measure(Shape(requests=size), rounds) for size in BATCHES}
    for size, spent in found.items():
        print(f"{size} requests: " + ", ".join(f"{name} {ms:.3f}" for name, ms in spent.items()))
    growth = {}
    for name, shapes in Shape().grown().items():
        growth[name] = {str(getattr(shape, name)): whole(shape, rounds) for shape in shapes}
        print(f"{name}: " + ", ".join(f"{size} {ms:.3f}" for size, ms in growth[name].items()))
    if arguments.output:
        made_by = {
            "command": "python -m benchmarks.drafting",
            "machine": platform.machine(),
            "versions": {"torch": version("torch")},
            "shape": asdict(Shape()),
        }
        results = made_by | {"milliseconds_by_requests": found, "milliseconds_of_all": growth}
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def parts(shape: Shape) -> dict[str, Callable[[], object]]:
    """The parts of one drafting, products in bfloat16 and in int8."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    joint, rows = shape.heads * shape.units, shape.requests * shape.heads
    input_B2D = torch.randn(shape.requests, 2 * HIDDEN, dtype=dtype)
    hidden_BJ = torch.randn(shape.requests, joint, dtype=dtype)
    states_ND = torch.randn(rows, HIDDEN, dtype=dtype)
    first_J2D = torch.randn(joint, 2 * HIDDEN, dtype=dtype)
    second_KDJ = torch.randn(shape.heads * HIDDEN, joint, dtype=dtype)
    # Logits as far apart as a model's: much further, and exponentials underflow, which is slow.
    lm_head_VD = torch.randn(shape.scored, HIDDEN, dtype=dtype) * (_LOGITS_SPREAD / HIDDEN**0.5)
    logits_NV = linear(states_ND, lm_head_VD).float()
    found: dict[str, Callable[[], object]] = {
        "best ids": lambda: logits_NV.topk(CANDIDATES),
        "their normaliser": lambda: logits_NV.logsumexp(1),
    }
    for name, x, weight in (
        ("hidden layer", input_B2D, first_J2D),
        ("output layer", hidden_BJ, second_KDJ),
        ("scores of the ids", states_ND, lm_head_VD),
    ):
        found[name] = partial(linear, x, weight)
        found[f"{name}, int8"] = partial(RoundedWeight(weight).product, x)
    return found


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    """CPU milliseconds of each part."""
    with torch.inference_mode():
        return {name: milliseconds(work, rounds) for name, work in parts(shape).items()}


def whole(shape: Shape, rounds: int) -> float:
    """CPU milliseconds of all parts, each product as it is served: int8 for few rows."""
    found = parts(shape)
    rows = {"hidden layer": shape.requests, "output layer": shape.requests}
    rows["scores of the ids"] = shape.requests * shape.heads
    served = [
        found[f"{name}, int8" if count <= MOST_ROWS else name] for name, count in rows.items()
    ]
    served += [found["best ids"], found["their normaliser"]]
    with torch.inference_mode():
        return round(sum(milliseconds(work, rounds) for work in served), 4)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median CPU time of `work`, with none of its weights in a cache: the target's went through."""
    others = torch.zeros(_FLUSHED_BYTES, dtype=torch.int8)
    spent = []
    for _ in range(rounds):
        others.add_(1)
        started = time.thread_time()
        work()
        spent.append(1e3 * (time.thread_time() - started))
    return round(median(spent), 4)


if __name__ == "__main__":
    run_command(main)
