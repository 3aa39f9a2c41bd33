"""Builds one engine for every way a user may ask for `bpd`, and answers with each.

Run as `python -m integration_tests.harness.ways_in REQUEST_FILE`: a JSON object with `base`
(options that every way gets, as command-line words), `prompt` (token ids), `max_tokens`, and
`ways`: name to `{"argv": [...]}`, parsed by the real `vllm serve` parser, or `{"llm": {...}}`,
keyword arguments of `vllm.LLM`. The last line printed begins with REPLIES and gives, for each way,
ids, method and number of drafts, or the error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Try every way in turn."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    replies = {}
    for name, way in request["ways"].items():
        try:
            # Whose mistake it is, the `vllm` command's user's or a program's, is told by its name.
            sys.argv[0] = "vllm" if "argv" in way else "program.py"
            if "argv" in way:
                replies[name] = asyncio.run(serve_arguments(request, way["argv"]))
            else:
                replies[name] = offline(request, way["llm"])
        except SystemExit as stop:
            replies[name] = {"error": str(stop), "exit": True}
        except Exception as error:
            replies[name] = {"error": str(error), "type": type(error).__name__}
        finally:
            clean_up()
    print("REPLIES " + json.dumps(replies), flush=True)


async def serve_arguments(request: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """What `vllm serve` does with its command line, up to the engine that answers requests."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args([*request["base"], *argv]))
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        ids: list[int] = []
        prompt = {"prompt_token_ids": request["prompt"]}
        async for output in engine.generate(prompt, params, "ways-in"):
            ids = list(output.outputs[0].token_ids)
        return describe(ids, engine.vllm_config)
    finally:
        engine.shutdown()


def offline(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """`vllm.LLM` with keyword arguments."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
    output = llm.generate({"prompt_token_ids": request["prompt"]}, params, use_tqdm=False)[0]
    reply = describe(list(output.outputs[0].token_ids), llm.llm_engine.vllm_config)
    llm.llm_engine.engine_core.shutdown()
    return reply


def describe(ids: list[int], vllm_config: Any) -> dict[str, Any]:
    """The reply for one way."""
    speculative = vllm_config.speculative_config
    return {
        "ids": ids,
        "method": None if speculative is None else speculative.method,
        "drafts": None if speculative is None else speculative.num_speculative_tokens,
        "said": repr(speculative),
    }


def clean_up() -> None:
    """Give back what an in-process engine held."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


if __name__ == "__main__":
    main()
