"""Holds `benchmarks.roofline` against this machine: what verifying k tokens and drafting them cost,
foretold and measured.

Foretold from two rates of one core, measured beside it: bytes a second of an LM-head product with
one row, and multiplications a second with 256. The step's overhead is what one token of one
request takes beyond that, the only figure that is fitted. Measured: forwards of a plain target
over a filled cache, and heads of the shipped shape, alternately, in CPU seconds, which another job
does not lengthen. Only ratios mean anything elsewhere.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.roofline import Heads, Machine, Model, draft_seconds, step_seconds
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.heads import BlockwiseHeads

_RESULTS = Path(__file__).parent / "results" / "roofline-anchor.json"
BATCHES = (1, 8)
BLOCKS = (1, 2, 3, 5, 9)
DRAFTING = -1  # stands for a block where seconds are looked up
COUNT, HIDDEN_EACH, SCORED = 4, 560, 8192  # heads, hidden units of each, ids


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline_anchor", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--target", required=True, help="folder or hub id of a Llama")
    parser.add_argument("--context", type=int, default=128, help="tokens cached a request")
    parser.add_argument("--rounds", type=int, default=9, help="alternating repetitions")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, model = load(args.target)
    works: dict[tuple[int, int], Callable[[], object]] = {
        (batch, block): forward(target, batch, block, args.context)
        for batch in BATCHES
        for block in BLOCKS
    }
    lm_head_VD = target.get_output_embeddings().weight
    rates: dict[tuple[int, int], Callable[[], object]] = {
        (rows, 0): product(lm_head_VD, rows) for rows in (1, 256)
    }
    drafts: dict[tuple[int, int], Callable[[], object]] = {
        (batch, DRAFTING): drafting(lm_head_VD, batch) for batch in BATCHES
    }
    seconds = fastest(works | rates | drafts, args.rounds)
    machine = Machine(
        platform.machine(),
        flops=2 * 256 * lm_head_VD.numel() / seconds[256, 0],
        bandwidth=lm_head_VD.numel() * model.bytes_each / seconds[1, 0],
    )
    foretold = step_seconds(model, machine, 1, 1, args.context)
    machine = replace(machine, overhead=seconds[1, 1] - foretold)
    points = compare(model, machine, args.context, seconds)
    found = {
        "target": Path(args.target).name,
        "context": args.context,
        "threads": 1,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "gflops": round(machine.flops / 1e9, 1),
        "gigabytes_per_s": round(machine.bandwidth / 1e9, 1),
        "overhead_share": round(machine.overhead / seconds[1, 1], 3),
        "points": points,
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for point in points:
        what = "drafting" if point["block"] == DRAFTING else f"k {point['block']}"
        print(
            f"batch {point['batch']}, {what}: measured {point['measured']:.2f}, "
            f"foretold {point['foretold']:.2f}"
        )


def load(name: str) -> tuple[Any, Model]:
    """The target in bfloat16, and its shape."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return target, Model(
        Path(name).name,
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.intermediate_size,
        config.vocab_size,
    )


def forward(target: Any, batch: int, block: int, context: int) -> Callable[[], object]:
    """A step that verifies `block` tokens of each request behind `context` cached ones."""
    generator = torch.Generator().manual_seed(0)
    vocab = target.config.vocab_size
    ids_BT = torch.randint(vocab, (batch, context + block), generator=generator)
    with torch.inference_mode():
        cache = target(ids_BT[:, :context], use_cache=True, logits_to_keep=1).past_key_values

    def step() -> object:
        with torch.inference_mode():
            found = target(ids_BT[:, context:], past_key_values=cache)
            cache.crop(-block)
            return found

    return step


def product(weight_VD: Tensor, rows: int) -> Callable[[], object]:
    """The LM head's product with `rows` rows."""
    states_RD = torch.randn(rows, weight_VD.shape[1], dtype=weight_VD.dtype)

    def multiply() -> object:
        with torch.inference_mode():
            return torch.nn.functional.linear(states_RD, weight_VD)

    return multiply


def drafting(lm_head_VD: Tensor, batch: int) -> Callable[[], object]:
    """Best ids of heads of the shipped shape, random ones, for `batch` requests."""
    hidden = lm_head_VD.shape[1]
    fingerprint = TargetFingerprint("LlamaForCausalLM", 1, hidden, len(lm_head_VD))
    heads = BlockwiseHeads(HeadsConfig(COUNT, HIDDEN_EACH, fingerprint)).to(lm_head_VD.dtype)
    scored_VD = lm_head_VD[:SCORED].clone()
    states_BD = torch.randn(batch, hidden, dtype=lm_head_VD.dtype)

    def draft() -> object:
        with torch.inference_mode():
            return torch.nn.functional.linear(heads(states_BD, states_BD), scored_VD).argmax(-1)

    return draft


def fastest(
    works: dict[tuple[int, int], Callable[[], object]], rounds: int
) -> dict[tuple[int, int], float]:
    """CPU seconds of the quickest of `rounds` runs of each, all in turn."""
    seconds = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            started = time.thread_time()
            work()
            seconds[name] = min(seconds[name], time.thread_time() - started)
    return seconds


def compare(
    model: Model, machine: Machine, context: int, seconds: dict[tuple[int, int], float]
) -> list[dict[str, float]]:
    """Verifying k tokens, and drafting, over a step of one token, at each batch."""
    heads = Heads(COUNT, COUNT * HIDDEN_EACH, SCORED)
    points = []
    for batch in BATCHES:
        plain = step_seconds(model, machine, batch, 1, context)
        for block in (*BLOCKS[1:], DRAFTING):
            if block == DRAFTING:
                foretold = draft_seconds(model, machine, heads, batch)
            else:
                foretold = step_seconds(model, machine, batch, block, context)
            points.append(
                {
                    "batch": batch,
                    "block": block,
                    "measured": round(seconds[batch, block] / seconds[batch, 1], 3),
                    "foretold": round(foretold / plain, 3),
                }
            )
    return points


if __name__ == "__main__":
    main()
