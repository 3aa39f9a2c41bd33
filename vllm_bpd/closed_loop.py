"""Requests through an engine of this process, so many at a time: the load that tuning measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def closed_loop(
    llm: Any, prompts: Sequence[list[int]], concurrency: int, max_tokens: int, name: str
) -> float:
    """Tokens a second of answering `prompts`, `concurrency` at a time: one ends, the next begins.

    `prompts` are token ids, answers greedy. `name` sets these requests' ids apart from those of
    other runs.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )
    tokens = sent = done = 0
    started = time.perf_counter()
    while done < len(prompts):
        while sent < len(prompts) and sent - done < concurrency:
            engine.add_request(f"{name}-{sent}", {"prompt_token_ids": prompts[sent]}, params)
            sent += 1
        for output in engine.step():
            tokens += len(output.outputs[0].token_ids)
            done += 1
    return tokens / (time.perf_counter() - started)
