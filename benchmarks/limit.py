"""How much of what is possible `bpd` reaches, and where the rest of a step goes.

Two engines in this process take turns (model runner V1): one verifies drafts that cost nothing to
make and are always wrong, so that a step that verifies n of them takes t(n); the other serves
`bpd`. With tokens a step of the latter and the mean of t(n) over its steps' own n,

    possible = tokens a step * t(0) / mean t(n)        reached = its speed / speed without

(not t at the mean n, since t bends). What drafting costs is the time spent in the drafter, over
that mean. Only decoding steps count. Seconds mean nothing on another machine; ratios are what is
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.acceptance import read_categories
from benchmarks.wrong_drafts import WrongDrafts
from vllm_bpd.arguments import at_least_one, output_file, run_command

MOST_DRAFTS = 8
_FEWEST_PROMPTS = 16  # of a batch size, in all rounds


@dataclass
class Drafting:
    """What our drafter did so far, in all."""

    seconds: float = 0.0
    drafts: int = 0
    heads_seconds: float = 0.0  # of `seconds`: heads, scores, their best
    text_seconds: float = 0.0  # of `seconds`: matches, and the choice among candidates


@dataclass
class Steady:
    """Decoding steps of a batch whose requests all run."""

    seconds: list[float] = field(default_factory=list)  # of each step
    drafts: list[int] = field(default_factory=list)  # made in each step, for all requests
    tokens: int = 0
    drafting: Drafting = field(default_factory=Drafting)

    def add(self, other: Steady) -> None:
        """Take another run's steps in."""
        self.seconds += other.seconds
        self.drafts += other.drafts
        self.tokens += other.tokens
        self.drafting = _sum(self.drafting, other.drafting)

    @property
    def step(self) -> float:
        """Seconds a step, mean."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def tokens_per_step(self) -> float:
        """Tokens a step, of the whole batch."""
        return self.tokens / len(self.seconds)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.limit", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--prompts", type=Path, help="JSONL (default: the demo's prompts)")
    parser.add_argument("--target", help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", help="folder or hub id of heads (default: found for target)")
    parser.add_argument("--batch-sizes", type=at_least_one, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--max-tokens", type=at_least_one, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=output_file, help="JSON file")
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """The measurement itself."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm_bpd.demo_target import export_demo_target

    texts = [text for group in read_categories(arguments.prompts).values() for text in group]
    random.Random(0).shuffle(texts)  # files are often sorted by category
    target = arguments.target or str(export_demo_target())
    free = _engine(
        arguments,
        target,
        {
            "method": "custom_class",
            "model": "benchmarks.wrong_drafts.WrongDrafts",
            "num_speculative_tokens": MOST_DRAFTS,
        },
    )
    heads = {"model": arguments.heads} if arguments.heads else {}
    bpd = _engine(arguments, target, {"method": "bpd", **heads})
    drafting = _watch_drafting()
    results = {}
    for size in arguments.batch_sizes:
        results[str(size)] = measure(arguments, free, bpd, drafting, texts, size)
        print(json.dumps({size: results[str(size)]}, indent=1))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        made = {
            "prompts": arguments.prompts.name if arguments.prompts else "the demo's",
            "rounds": arguments.rounds,
            "max_tokens": arguments.max_tokens,
            "dtype": arguments.dtype,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {name: version(name) for name in ("vllm", "torch", "vllm-bpd")},
            "by_batch_size": results,
        }
        arguments.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def measure(
    arguments: argparse.Namespace,
    free: Any,
    bpd: Any,
    drafting: Drafting,
    texts: list[str],
    size: int,
) -> dict[str, Any]:
    """Figures of one batch size."""
    by_count = {count: Steady() for count in (0, 1, 2, 3, 4, 6, MOST_DRAFTS)}
    ours = Steady()
    warm = _prompts(free, texts, size, 0)
    for llm in (free, bpd):
        steady(llm, warm, 16, drafting)
    for number in range(max(arguments.rounds, _FEWEST_PROMPTS // size)):
        prompts = _prompts(free, texts, size, number)
        for count, kept in by_count.items():
            WrongDrafts.count = count
            kept.add(steady(free, prompts, min(arguments.max_tokens, 48), drafting))
        ours.add(steady(bpd, prompts, arguments.max_tokens, drafting))
    steps = {count: kept.step for count, kept in by_count.items()}
    verify = fmean(_between(steps, drafts / size) for drafts in ours.drafts)
    tokens_per_step = ours.tokens_per_step / size
    possible = tokens_per_step * steps[0] / verify
    reached = tokens_per_step * steps[0] / ours.step
    return {
        "step_over_plain_by_drafts": {str(n): t / steps[0] for n, t in steps.items()},
        "plain_step_seconds": steps[0],
        "tokens_per_step": tokens_per_step,
        "drafts_per_step": fmean(ours.drafts) / size,
        "possible": possible,
        "reached": reached,
        "reached_over_possible": reached / possible,
        "drafting_over_verification": ours.drafting.seconds / len(ours.seconds) / verify,
        "drafting_milliseconds_a_step": {
            name: 1e3 * seconds / len(ours.seconds)
            for name, seconds in (
                ("all", ours.drafting.seconds),
                ("heads", ours.drafting.heads_seconds),
                ("text", ours.drafting.text_seconds),
            )
        },
    }


def steady(llm: Any, prompts: list[list[int]], max_tokens: int, drafting: Drafting) -> Steady:
    """Run the prompts as one batch; the steps from when all decode until the first one ends."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    ids = [f"{time.perf_counter_ns()}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(ids, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    lengths: dict[str, int] = {}
    found, ended = Steady(), False
    while engine.has_unfinished_requests():
        counted = len(lengths) == len(prompts) and not ended
        before, drafted = sum(lengths.values()), replace(drafting)
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            lengths[output.request_id] = len(output.outputs[0].token_ids)
            ended |= output.finished
        if counted and not ended:
            found.seconds.append(seconds)
            found.tokens += sum(lengths.values()) - before
            found.drafting = _sum(found.drafting, _sum(drafting, drafted, -1))
            found.drafts.append(drafting.drafts - drafted.drafts)
    return found


def _sum(one: Drafting, other: Drafting, times: int = 1) -> Drafting:
    """`one` and `times` the other, field by field."""
    return Drafting(*(a + times * b for a, b in zip(astuple(one), astuple(other), strict=True)))


def _watch_drafting() -> Drafting:
    """Counts every call of our drafter from now on, and of its two parts."""
    from vllm_bpd import lattice_host
    from vllm_bpd.model import BlockwiseHeadsModel
    from vllm_bpd.proposer import BpdProposer

    seen = Drafting()

    def watch(owner: Any, name: str, part: str, after: Callable[[Any], None]) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = original(*arguments)
            setattr(seen, part, getattr(seen, part) + time.perf_counter() - started)
            after(result)
            return result

        setattr(owner, name, watched)

    def count(drafts: list[list[int]]) -> None:
        seen.drafts += sum(map(len, drafts))

    watch(BpdProposer, "propose", "seconds", count)
    watch(BlockwiseHeadsModel, "candidates", "heads_seconds", lambda _: None)
    watch(lattice_host, "draft_blocks", "text_seconds", lambda _: None)
    return seen


def _engine(arguments: argparse.Namespace, target: str, speculative: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        target,
        speculative_config=speculative,
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=max(arguments.batch_sizes),
        enable_prefix_caching=False,
    )


def _prompts(llm: Any, texts: list[str], size: int, number: int) -> list[list[int]]:
    """Token ids of `size` prompts, others in every round."""
    tokenizer = llm.get_tokenizer()
    chosen = [texts[(number * size + i) % len(texts)] for i in range(size)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in chosen
    ]


def _between(steps: dict[int, float], drafts: float) -> float:
    """t(drafts), straight lines between the measured numbers."""
    counts = sorted(steps)
    for low, high in pairwise(counts):
        if drafts <= high:
            share = (drafts - low) / (high - low)
            return steps[low] + share * (steps[high] - steps[low])
    return steps[counts[-1]]


if __name__ == "__main__":
    run_command(main)
