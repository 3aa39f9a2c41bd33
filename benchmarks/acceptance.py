"""Served acceptance of a set of heads: mean accepted block by category, from engine counters.

`make bench` runs it on the demo's prompts. Any JSONL with `prompt`, or Spec-Bench's `turns` (the
first is taken), and optionally `category`, may be given instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve the prompts with `bpd`, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=Path, help="JSONL (default: the demo's prompts)")
    parser.add_argument("--target", help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", help="folder or hub id of heads (default: found for target)")
    parser.add_argument("--drafts", type=int, help="num_speculative_tokens (default: all heads)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, tokens")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once")
    parser.add_argument("--output", type=Path, help="JSON file for the raw results")
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """The measurement itself."""
    from vllm import LLM, SamplingParams

    from vllm_bpd.demo_target import export_demo_target

    target = arguments.target or str(export_demo_target())
    speculative: dict[str, Any] = {"method": "bpd"}
    if arguments.heads:
        speculative["model"] = arguments.heads
    if arguments.drafts:
        speculative["num_speculative_tokens"] = arguments.drafts
    llm = LLM(
        target,
        speculative_config=speculative,
        max_num_seqs=arguments.concurrency,
        max_model_len=4096,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    rows: dict[str, dict[str, Any]] = {}
    for category, prompts in read_categories(arguments.prompts).items():
        before, started = _counters(llm), time.perf_counter()
        outputs = llm.chat([[{"role": "user", "content": p}] for p in prompts], params)
        after = _counters(llm)
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        rows[category] = {
            "prompts": len(prompts),
            "tokens": tokens,
            "seconds": time.perf_counter() - started,
            **{name: _minus(after[name], before[name]) for name in after},
        }
    rows["all"] = _total(list(rows.values()))
    print(f"{'category':<16}{'prompts':>8}{'tokens':>8}{'k-hat':>7}  acceptance by position")
    for category, row in rows.items():
        row["mean_accepted_block"] = 1 + row["num_accepted_tokens"] / row["num_drafts"]
        shares = " ".join(f"{n / row['num_drafts']:.3f}" for n in row["accepted_per_position"])
        print(
            f"{category:<16}{row['prompts']:>8}{row['tokens']:>8}"
            f"{row['mean_accepted_block']:>7.3f}  {shares}"
        )
    if arguments.output:
        write_results(arguments.output, vars(arguments), rows)


def read_categories(path: Path | None) -> dict[str, list[str]]:
    """Prompts by category, in file order."""
    if path is None:
        from vllm_bpd.demo.prompts import PROMPTS

        return {"demo": list(PROMPTS)}
    found: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        prompt = record["turns"][0] if "turns" in record else record.get("prompt")
        if not isinstance(prompt, str):
            raise SystemExit(f"{path}:{number}: found {sorted(record)}; expected prompt or turns")
        found.setdefault(record.get("category", "all prompts"), []).append(prompt)
    return found


def write_results(path: Path, arguments: dict[str, Any], rows: dict[str, Any]) -> None:
    """Raw results with what made them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = {name: str(value) for name, value in arguments.items() if name != "output"}
    made_by["prompts"] = Path(made_by["prompts"]).name
    for name in ("target", "heads"):
        made_by[name] = Path(made_by[name]).name
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    versions = {name: version(name) for name in ("vllm", "torch", "vllm-bpd")}
    path.write_text(
        json.dumps({"arguments": made_by, **machine, "versions": versions, "rows": rows}, indent=2)
        + "\n",
        encoding="utf-8",
    )


def _counters(llm: Any) -> dict[str, Any]:
    names = {
        "vllm:spec_decode_num_drafts": "num_drafts",
        "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
    }
    found = {metric.name: metric for metric in llm.get_metrics()}
    return {
        ours: found[theirs].values if ours == "accepted_per_position" else found[theirs].value
        for theirs, ours in names.items()
    }


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total = {
        name: sum(row[name] for row in rows) for name in rows[0] if name != "accepted_per_position"
    }
    positions = zip(*(row["accepted_per_position"] for row in rows), strict=True)
    return {**total, "accepted_per_position": [sum(column) for column in positions]}


if __name__ == "__main__":
    main()
