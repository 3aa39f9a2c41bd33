"""The program inside an engine process: build an engine, generate, report, free, repeat.

Run as `python -m integration_tests.harness.worker JOBS_FD REPLIES_FD`. A job is a dict:

- `llm`: keyword arguments of `vllm.LLM`;
- `batches`: a list of `{"prompts": [[token id]], "sampling": {SamplingParams arguments}}`, where
  `sampling` may also be a list with one dict for each prompt; `drafts` names what drafts in this
  batch: `heads` (the default: no stand-in), `lattice` (no stand-in either: heads that have one,
  under `watch`), `oracle` or `corrupted`. In place of `prompts` and `sampling`, a batch may have
  `requests` (see `driver.py`), or `prompts` and `beam` (BeamSearchParams arguments). `repeat` runs
  it that many times, `lasting` again and again for so many seconds at least, `blocks` asks for
  every block that the heads drafted, and `processors` says that more than the target's logits
  decides its tokens;
- `drafts`, optional: the stand-in to install for this job, see `stand_ins.installed`;
- `async_scheduling`, optional: true keeps asynchronous scheduling on, which vLLM turns off on CPUs;
- `save_heads`, optional: folder that receives the engine's heads once the batches are done;
- `states`, optional: a file that receives the hidden states the heads are given, see `captures`;
- `environment`, optional: environment variables for this job only.

The reply has `ok`; when true also `vllm` (version), `runner` (`V1`/`V2`), `async_scheduling`,
`build_seconds` and `batches`, each with `outputs` (of its last run), `rounds` (all different
outputs of its runs), `resident` (bytes held behind each run), `seconds`, `faults` (what a stand-in
found wrong in the heads' inputs), `lattice` (what a watch counted), `blocks` (with the `plugin`
stand-in: each request's tokens so far, and what heads drafted) and `spec`, the speculative counters
of that batch alone. When `ok` is false, `error` is the error's last line and `trace` is all of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from integration_tests.harness import driver, interpreted
from integration_tests.harness.served import save_served

DEFAULT_LLM = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "disable_log_stats": False,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.2,
    "num_gpu_blocks_override": 512,
}
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of one job."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def async_scheduling_kept() -> Iterator[None]:
    """Turn asynchronous scheduling on again after the CPU platform has turned it off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.__dict__["check_and_update_config"]

    def check_and_update_config(vllm_config: Any) -> None:
        original.__func__(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_update_config)
    try:
        yield
    finally:
        platform.check_and_update_config = original


def model_runner(llm: Any) -> Any:
    """The model runner of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def runner_name(runner: Any) -> str:
    """`V2` if the runner descends from the new model runner, else `V1`."""
    modules = {base.__module__ for base in type(runner).__mro__}
    return "V2" if "vllm.v1.worker.gpu.model_runner" in modules else "V1"


def counters(llm: Any) -> dict[str, Any]:
    """The engine's speculative counters so far, summed since the process began."""
    found: dict[str, Any] = {"drafts": 0, "drafted": 0, "accepted": 0, "per_position": []}
    for metric in llm.get_metrics():
        name = COUNTERS.get(metric.name)
        if name == "per_position":
            found[name] = list(metric.values)
        elif name is not None:
            found[name] = int(metric.value)
    return found


def counted_since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The counters of what happened between two readings."""
    grown = {name: after[name] - before[name] for name in ("drafts", "drafted", "accepted")}
    old = before["per_position"] or [0] * len(after["per_position"])
    grown["per_position"] = [
        new - past for new, past in zip(after["per_position"], old, strict=True)
    ]
    return grown


def sampling_params(sampling: Any) -> Any:
    """`SamplingParams` from plain data: one for all prompts, or a list with one for each."""
    from vllm import SamplingParams

    if isinstance(sampling, list):
        return [SamplingParams(**one) for one in sampling]
    return SamplingParams(**sampling)


def plain_logprobs(completion: Any) -> list[dict[str, float]] | None:
    """The logprobs of a completion as plain data: token id (as text) to logprob, per token."""
    if completion.logprobs is None:
        return None
    return [{str(token): p.logprob for token, p in row.items()} for row in completion.logprobs]


def generate(llm: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Run one batch on the engine and describe its outputs and counters."""
    from integration_tests.harness import stand_ins, watch

    mode, processors = batch.get("drafts", "heads"), batch.get("processors", False)
    watched = mode == "lattice"
    stand_ins.SCRIPT.begin("heads" if watched else mode, processors)
    before = counters(llm)
    started = time.monotonic()
    until = started + batch.get("lasting", 0)
    rounds: dict[str, None] = {}  # each once, as text: what this process holds is looked at
    resident: list[int] = []
    with watch.watching(llm) if watched else nullcontext() as seen:
        while len(resident) < batch.get("repeat", 1) or time.monotonic() < until:
            outputs = answer(llm, batch)
            rounds[json.dumps(outputs)] = None
            resident.append(resident_bytes())
    seconds = time.monotonic() - started
    lattice: dict[str, Any] = {"highest": -1, "faults": []}
    if seen:
        lattice = seen.report(processors)
    return {
        "outputs": outputs,
        "rounds": [json.loads(text) for text in rounds],
        "seconds": seconds,
        "spec": counted_since(before, counters(llm)),
        "faults": stand_ins.SCRIPT.faults[:10] + lattice["faults"],
        "lattice": lattice,
        "blocks": stand_ins.SCRIPT.blocks if batch.get("blocks") else [],
        "highest_draft": max(stand_ins.SCRIPT.highest, lattice["highest"]),
        "metrics": driver.gauges(llm),
        "resident": resident,
    }


def answer(llm: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of one batch, whichever kind it is."""
    if "requests" in batch:
        return driver.Drive(llm, batch).run()
    if "beam" in batch:
        return driver.beam(llm, batch)
    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    results = llm.generate(prompts, sampling_params(batch["sampling"]), use_tqdm=False)
    return [
        {
            "token_ids": list(result.outputs[0].token_ids),
            "finish_reason": result.outputs[0].finish_reason,
            "logprobs": plain_logprobs(result.outputs[0]),
        }
        for result in results
    ]


def resident_bytes() -> int:
    """What this process holds of the machine's memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free(llm: Any) -> None:
    """Give back everything the engine held, so that the next one starts clean."""
    from vllm.distributed import cleanup_dist_env_and_memory

    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Build the job's engine, run its batches, and free the engine again."""
    import vllm

    from integration_tests.harness import captures, stand_ins

    llm = None
    with ExitStack() as stack:
        stack.enter_context(environment(job.get("environment", {})))
        try:
            if job.get("async_scheduling"):
                stack.enter_context(async_scheduling_kept())
            if job.get("drafts"):
                stack.enter_context(stand_ins.installed(job["drafts"]))
            if job.get("states"):
                stack.enter_context(captures.kept_in(Path(job["states"])))
            started = time.monotonic()
            llm = vllm.LLM(**{**DEFAULT_LLM, **job["llm"]})
            runner = model_runner(llm)
            reply = {
                "ok": True,
                "vllm": vllm.__version__,
                "runner": runner_name(runner),
                "runner_class": f"{type(runner).__module__}.{type(runner).__qualname__}",
                "async_scheduling": bool(
                    llm.llm_engine.vllm_config.scheduler_config.async_scheduling
                ),
                "build_seconds": time.monotonic() - started,
            }
            stand_ins.follow(runner)
            reply["batches"] = [generate(llm, batch) for batch in job["batches"]]
            if job.get("save_heads"):
                save_served(runner, Path(job["save_heads"]))
            return reply
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return {"ok": False, "error": lines[-1], "trace": traceback.format_exc()}
        finally:
            stand_ins.follow(None)
            free(llm)


def main() -> None:
    """Serve jobs until the job pipe closes."""
    jobs = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8")
    replies = os.fdopen(int(sys.argv[2]), "w", encoding="utf-8")
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted.pretend_triton_backend()
        interpreted.replace_kernels()
    for line in jobs:
        replies.write(json.dumps(run_job(json.loads(line))) + "\n")
        replies.flush()
    # Every engine is freed by now; the interpreter's own leave-taking takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
