"""Where drafting's time goes on a CPU, part by part: CPU milliseconds of one thread.

Random weights in the shapes of the shipped heads. CPU time, so another job does not count; only
ratios mean anything on another machine.

Shape suffixes: B requests, D hidden size, J joint hidden size, K heads, N = B * K rows, V scored
ids, M candidates.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear

from vllm_bpd.few_rows import RoundedWeight
from vllm_bpd.lattice import CANDIDATES

HIDDEN, JOINT, HEADS, SCORED = 576, 2240, 4, 8192
BATCHES = (1, 2, 8, 32)
_LOGITS_SPREAD = 4.0  # standard deviation
_FLUSHED_BYTES = 128 << 20  # more than any cache holds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafting", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=30, help="of each part; the median counts")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {str(size): measure(size, arguments.rounds) for size in BATCHES}
    for size, parts in found.items():
        print(f"{size} requests: " + ", ".join(f"{name} {ms:.3f}" for name, ms in parts.items()))
    if arguments.output:
        made_by = {
            "command": "python -m benchmarks.drafting",
            "machine": platform.machine(),
            "versions": {"torch": version("torch")},
        }
        results = made_by | {"milliseconds_by_requests": found}
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(requests: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of each part for `requests` requests."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    input_B2D = torch.randn(requests, 2 * HIDDEN, dtype=dtype)
    hidden_BJ = torch.randn(requests, JOINT, dtype=dtype)
    states_ND = torch.randn(requests * HEADS, HIDDEN, dtype=dtype)
    first_J2D = torch.randn(JOINT, 2 * HIDDEN, dtype=dtype)
    second_KDJ = torch.randn(HEADS * HIDDEN, JOINT, dtype=dtype)
    # Logits as far apart as a model's: much further, and exponentials underflow, which is slow.
    lm_head_VD = torch.randn(SCORED, HIDDEN, dtype=dtype) * (_LOGITS_SPREAD / HIDDEN**0.5)
    logits_NV = linear(states_ND, lm_head_VD).float()
    parts: dict[str, Callable[[], object]] = {
        "best ids": lambda: logits_NV.topk(CANDIDATES),
        "their normaliser": lambda: logits_NV.logsumexp(1),
    }
    for name, x, weight in (
        ("hidden layer", input_B2D, first_J2D),
        ("output layer", hidden_BJ, second_KDJ),
        ("scores of the ids", states_ND, lm_head_VD),
    ):
        parts[name] = partial(linear, x, weight)
        parts[f"{name}, int8"] = partial(RoundedWeight(weight).product, x)
    with torch.inference_mode():
        return {name: milliseconds(work, rounds) for name, work in parts.items()}


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
    main()
