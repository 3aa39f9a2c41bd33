"""Builds one engine for each case of a request, lets it answer, and reports ids and counters.

Run as `python -m integration_tests.distributed.engines REQUEST_FILE`: a JSON object with `engine`
(arguments that every case gets), `prompts` (token ids), `max_tokens`, `cases` (name to further
arguments) and optionally `ray` (arguments of `ray.init`: a cluster of this process's own). Each
case prints a line that begins with REPLY: its name and ids, speculative counters and runner, or its
error. The engine is `AsyncLLM`, the one inside `vllm serve`, which alone has data parallelism.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from integration_tests.harness.worker import COUNTERS, DEFAULT_LLM


def main() -> None:
    """Try every case in turn."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "ray" in request:
        import ray

        ray.init(**request["ray"])
        # The engine's own process would start another Ray, without the GPUs.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    for name, arguments in request["cases"].items():
        started = time.monotonic()
        try:
            engine_arguments = {**DEFAULT_LLM, **request["engine"], **arguments}
            reply = asyncio.run(answer(request, engine_arguments))
        except BaseException as error:
            reply = {"error": str(error), "type": type(error).__name__}
        finally:
            clean_up()
        reply["seconds"] = time.monotonic() - started
        print("REPLY " + json.dumps([name, reply]), flush=True)


async def answer(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Build an engine, send every prompt at once, and describe what came."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments.pop("disable_log_stats")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)

    async def ids_of(place: int, prompt: list[int]) -> list[int]:
        ids: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, params, str(place)):
            ids = list(output.outputs[0].token_ids)
        return ids

    try:
        before = counters()
        ids = await asyncio.gather(*map(ids_of, range(len(request["prompts"])), request["prompts"]))
        await asyncio.sleep(0.5)  # the last step's counters come after its tokens
        parallel = engine.vllm_config.parallel_config
        return {
            "ids": ids,
            "spec": {name: value - before[name] for name, value in counters().items()},
            "replicas": len(drafting_replicas()),
            "runner": "V2" if engine.vllm_config.use_v2_model_runner else "V1",
            "executor": str(parallel.distributed_executor_backend),
            "async_scheduling": bool(engine.vllm_config.scheduler_config.async_scheduling),
        }
    finally:
        engine.shutdown()


def counters() -> dict[str, int]:
    """The speculative counters so far, summed over the engines of this process."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = dict.fromkeys(("drafts", "drafted", "accepted"), 0)
    for metric in get_metrics_snapshot():
        name = COUNTERS.get(metric.name)
        if name in found:
            found[name] += int(metric.value)
    return found


def drafting_replicas() -> set[str]:
    """The replicas, as vLLM numbers them, whose drafts were verified so far."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return {
        metric.labels["engine"]
        for metric in get_metrics_snapshot()
        if COUNTERS.get(metric.name) == "drafts" and metric.value > 0
    }


def clean_up() -> None:
    """Give back what an engine held."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


if __name__ == "__main__":
    main()
