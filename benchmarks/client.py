"""One load on one server, by vLLM's own benchmark client (`vllm bench serve`)."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.live_server import NAME


def measure(
    port: int,
    tokenizer: str,
    prompts: list[str],
    folder: Path,
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float,
) -> dict[str, Any]:
    """Speed, latencies and acceptance of `prompts`, `concurrency` at a time.

    Latencies are in seconds. Raises RuntimeError if a request failed.
    """
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    data = folder / "load.jsonl"
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args([
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--port", str(port), "--model", NAME, "--tokenizer", tokenizer,
        "--dataset-name", "custom", "--dataset-path", str(data), "--disable-shuffle",
        "--skip-chat-template", "--custom-output-len", str(max_tokens),
        "--num-prompts", str(len(prompts)), "--max-concurrency", str(concurrency),
        "--temperature", str(temperature), "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", str(folder),
        "--result-filename", "result.json",
    ])  # fmt: skip
    logging.getLogger("vllm").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
    return figures(json.loads((folder / "result.json").read_text(encoding="utf-8")))


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a result of `vllm bench serve`. Raises RuntimeError for failed requests."""
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} requests failed: {result['errors']}")
    gaps = [gap for request in result["itls"] for gap in request]
    found = {
        "requests": result["completed"],
        "tokens": result["total_output_tokens"],
        "seconds": result["duration"],
        "tokens_per_second": result["output_throughput"],
        "ttft_p50": _percentile(result["ttfts"], 50),
        "ttft_p99": _percentile(result["ttfts"], 99),
        "itl_p50": _percentile(gaps, 50),
        "itl_p99": _percentile(gaps, 99),
    }
    for name in ("num_drafts", "draft_tokens", "accepted_tokens"):
        found[name] = result.get(f"spec_decode_{name}", 0)
    return found


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[percent - 1]
