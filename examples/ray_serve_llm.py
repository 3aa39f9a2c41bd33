"""Serves a model with blockwise heads on Ray Serve LLM, behind an OpenAI-compatible API.

    $ python -m examples.ray_serve_llm --model MODEL
    $ curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 40}'

Heads are found as `vllm serve --speculative-config bpd` finds them, on each replica's own machine;
`--heads` names others. The plugin needs no mention: vLLM loads it in every worker that has it
installed. With `--cpu` the model runs on this machine's CPU, in a Ray cluster of its own.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

# Ray's logical CPUs; with fewer, something never starts.
CPUS_OF_A_REPLICA, CPUS_OF_THE_REST = 2, 4  # the rest: the ingress, and what ends replicas


def speculative_config(heads: str | None) -> dict[str, Any]:
    """What `engine_kwargs["speculative_config"]` says: `heads` named, or found."""
    return {"method": "bpd"} if heads is None else {"method": "bpd", "model": heads}


def llm_config(arguments: argparse.Namespace) -> LLMConfig:
    """One model with heads, on as few replicas as the load allows."""
    accelerator: Any = {"kind": "cpu"} if arguments.cpu else None  # without it Ray awaits a GPU
    return LLMConfig(
        model_loading_config={"model_id": arguments.model, "model_source": arguments.model},
        engine_kwargs={
            "speculative_config": speculative_config(arguments.heads),
            **arguments.engine_kwargs,
        },
        accelerator_config=accelerator,
        deployment_config={
            "autoscaling_config": {
                "min_replicas": arguments.min_replicas,
                "max_replicas": arguments.max_replicas,
                "target_ongoing_requests": arguments.requests_per_replica,
            },
        },
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--model", required=True, help="folder or hub id of the target")
    made.add_argument("--heads", help="folder or hub id of its heads; default: found")
    made.add_argument("--cpu", action="store_true", help="on this machine's CPU, for trying out")
    made.add_argument("--port", type=int, default=8000, help="of the API, on 127.0.0.1")
    made.add_argument("--metrics-port", type=int, help="with --cpu: of /metrics; default: any")
    made.add_argument("--min-replicas", type=int, default=1, help="kept without load")
    made.add_argument("--max-replicas", type=int, default=1, help="under load")
    made.add_argument(
        "--requests-per-replica", type=int, default=32, help="more at once ask for a replica more"
    )
    made.add_argument(
        "--engine-kwargs",
        type=json.loads,
        default={},
        help="""more of vLLM's engine arguments, as JSON: '{"max_model_len": 4096}'""",
    )
    return made


def main() -> None:
    """Serve until interrupted."""
    arguments = parser().parse_args()
    if arguments.cpu:
        ray.init(
            num_cpus=CPUS_OF_A_REPLICA * arguments.max_replicas + CPUS_OF_THE_REST,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _metrics_export_port=arguments.metrics_port,
        )
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    try:
        serve.run(build_openai_app({"llm_configs": [llm_config(arguments)]}), blocking=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
