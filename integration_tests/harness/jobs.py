"""What the tests ask of an engine process, and the parts of a reply they look at."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration_tests.harness.engine_process import JOB_TIMEOUT, EngineProcess
from integration_tests.harness.oracle import Recording


def make_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def greedy(prompts: list[list[int]], max_tokens: int, drafts: str = "heads") -> dict[str, Any]:
    """A batch that decodes greedily to its length limit, drafting as `drafts` says."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"prompts": prompts, "sampling": sampling, "drafts": drafts}


def make_job(model: Path, batches: list[dict[str, Any]], **llm: Any) -> dict[str, Any]:
    """A job: one engine built with the arguments `llm`, and its batches."""
    return {"llm": {"model": str(model), **llm}, "batches": batches}


def stand_in(source: str, recordings: Sequence[Recording]) -> dict[str, Any]:
    """The `drafts` of a job that stands in for `source` with recorded text."""
    return {"source": source, "recordings": [[r.prompt, r.answer] for r in recordings]}


def run(engine: EngineProcess, job: dict[str, Any], seconds: float = JOB_TIMEOUT) -> dict[str, Any]:
    """Run a job that must succeed, on the release and runner it was meant for."""
    reply = engine.run(job, seconds)
    assert reply["ok"], reply["trace"]
    assert reply["runner"] == engine.combo.runner
    assert reply["vllm"].startswith(engine.combo.release + ".")
    return reply


def token_ids(batch: dict[str, Any]) -> list[list[int]]:
    """The ids generated in one batch of a reply."""
    return [output["token_ids"] for output in batch["outputs"]]


def record(prompts: list[list[int]], batch: dict[str, Any]) -> list[Recording]:
    """The recordings that one batch of a reply makes."""
    return [Recording(*pair) for pair in zip(prompts, token_ids(batch), strict=True)]
