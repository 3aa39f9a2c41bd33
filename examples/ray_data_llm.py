"""Answers a file of prompts with Ray Data LLM and blockwise heads.

    $ python -m examples.ray_data_llm --model MODEL --prompts PROMPTS.jsonl --output ANSWERS

Each line of the file is a JSON object with `prompt`; each line of the files written under
ANSWERS has `prompt` and `answer` (rows come in no order). With `--cpu` the model runs on this
machine's CPU, in a Ray cluster of its own.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

# Every stage takes one of Ray's logical CPUs, on however many real ones, and every engine one.
CPUS_OF_STAGES = 7


def processor(arguments: argparse.Namespace) -> Any:
    """Rows with `prompt` to rows with `prompt` and `answer`."""
    speculative_config = {"method": "bpd"}
    if arguments.heads is not None:
        speculative_config["model"] = arguments.heads
    config = vLLMEngineProcessorConfig(
        model_source=arguments.model,
        engine_kwargs={"speculative_config": speculative_config, **arguments.engine_kwargs},
        concurrency=arguments.engines,
        batch_size=arguments.batch_size,
        # Without it Ray waits for a GPU.
        placement_group_config={"bundles": [{"CPU": 1}]} if arguments.cpu else None,
    )
    sampling = {"temperature": 0, "max_tokens": arguments.max_tokens}
    return build_processor(
        config,
        preprocess=lambda row: {
            "messages": [{"role": "user", "content": row["prompt"]}],
            "sampling_params": sampling,
            "asked": row["prompt"],  # a later stage writes what its chat template makes to `prompt`
        },
        postprocess=lambda row: {"prompt": row["asked"], "answer": row["generated_text"]},
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--model", required=True, help="folder or hub id of the target")
    made.add_argument("--heads", help="folder or hub id of its heads; default: found")
    made.add_argument("--prompts", required=True, help="a JSONL file with `prompt` in each line")
    made.add_argument("--output", required=True, help="folder to write JSONL files into")
    made.add_argument("--cpu", action="store_true", help="on this machine's CPU, for trying out")
    made.add_argument("--engines", type=int, default=1, help="at most so many at once")
    made.add_argument("--batch-size", type=int, default=64, help="prompts handed over at once")
    made.add_argument("--max-tokens", type=int, default=256, help="of each answer")
    made.add_argument(
        "--engine-kwargs",
        type=json.loads,
        default={},
        help="""more of vLLM's engine arguments, as JSON: '{"max_model_len": 4096}'""",
    )
    return made


def main() -> None:
    """Answer every prompt, and write the answers."""
    arguments = parser().parse_args()
    if arguments.cpu:
        cpus = CPUS_OF_STAGES + arguments.engines
        ray.init(num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        answered = processor(arguments)(ray.data.read_json(arguments.prompts, lines=True))
        answered.write_json(arguments.output)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
