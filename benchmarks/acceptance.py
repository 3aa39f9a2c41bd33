"""Acceptance of a set of heads by category: as served, and as evaluation foretells it.

Served: the mean accepted block by the engine's counters. Walk: the same by `bpd-train evaluate`'s
exact walk over the answers that the engine gave, and the ratio of the two.

`make acceptance` runs it on the demo's prompts. Any JSONL with `prompt`, or Spec-Bench's `turns`
(the first is taken), and optionally `category`, may be given instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heads_training.evaluate import evaluate
from heads_training.lattice_walk import THRESHOLDS, threshold_key
from heads_training.records import Record, write_records
from vllm_bpd.arguments import at_least_one, output_file, run_command
from vllm_bpd.errors import HeadsError, read_json_lines, shown


def main() -> None:
    """Serve the prompts with `bpd`, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=Path, help="JSONL (default: the demo's prompts)")
    parser.add_argument("--target", help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", help="folder or hub id of heads (default: found for target)")
    parser.add_argument("--drafts", type=int, help="num_speculative_tokens (default: the most)")
    parser.add_argument(
        "--min-confidence",
        type=float,
        choices=THRESHOLDS,
        help="where drafts end (default: 0.1; 0, which is all that is walked, without own text)",
    )
    parser.add_argument(
        "--context-lookup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the request's own text help the heads",
    )
    parser.add_argument(
        "--max-tokens", type=at_least_one, default=256, help="longest answer, tokens"
    )
    parser.add_argument("--concurrency", type=at_least_one, default=32, help="requests at once")
    parser.add_argument(
        "--walk",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="walk over the answers, too; one more pass of the target over them",
    )
    parser.add_argument("--output", type=output_file, help="JSON file for the raw results")
    arguments = parser.parse_args()
    if arguments.min_confidence is None:
        arguments.min_confidence = 0.1 if arguments.context_lookup else 0.0
    if arguments.walk and arguments.min_confidence and not arguments.context_lookup:
        parser.error(
            f"--min-confidence: found {arguments.min_confidence}; heads alone are walked to the "
            "block's end: expected 0, or --no-walk"
        )
    run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """The measurement itself."""
    from vllm import LLM, SamplingParams

    from vllm_bpd.demo_target import export_demo_target

    categories = read_categories(arguments.prompts)
    target = arguments.target or str(export_demo_target())
    speculative: dict[str, Any] = {
        "method": "bpd",
        "min_confidence": arguments.min_confidence,
        "context_lookup": arguments.context_lookup,
    }
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
    records: list[Record] = []
    for category, prompts in categories.items():
        before, started = _counters(llm), time.perf_counter()
        outputs = llm.chat([[{"role": "user", "content": p}] for p in prompts], params)
        after = _counters(llm)
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        records += [_record(output, category) for output in outputs]
        rows[category] = {
            "prompts": len(prompts),
            "tokens": tokens,
            "seconds": time.perf_counter() - started,
            **{name: _minus(after[name], before[name]) for name in after},
        }
    rows["all"] = _total(list(rows.values()))
    for row in rows.values():
        row["mean_accepted_block"] = 1 + row["num_accepted_tokens"] / row["num_drafts"]
        # A request's first token comes from its prompt; steps without drafts are no drafts.
        stepped = row["tokens"] - row["prompts"]
        row["tokens_per_step"] = stepped / (stepped - row["num_accepted_tokens"])
        row["accepted_per_draft_token"] = row["num_accepted_tokens"] / row["num_draft_tokens"]
    if arguments.walk:
        chosen = llm.llm_engine.vllm_config.speculative_config
        llm.llm_engine.engine_core.shutdown()  # its memory is needed
        for category, k_hat in walked(chosen, target, records).items():
            rows[category]["walk"] = k_hat
            rows[category]["walk_over_served"] = k_hat / rows[category]["mean_accepted_block"]
    print(format_rows(rows))
    if arguments.output:
        write_results(arguments.output, vars(arguments), rows)


def walked(speculative: Any, target: str, records: list[Record]) -> dict[str, float]:
    """Mean accepted block by category and of all, by the exact walk, drafting as was served."""
    heads, k = Path(speculative.model), str(speculative.num_speculative_tokens + 1)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        write_records(answers, records)
        report = evaluate(heads, target, answers, Path(folder) / "states")
    if "with_own_text" in report and speculative.context_lookup:
        rows = report["with_own_text"][threshold_key(speculative.min_confidence)]
        found = {name: by_k[k]["k_hat"] for name, by_k in rows["by_group"].items()}
        return {**found, "all": rows["by_k"][k]["k_hat"]}
    found = {name: row["k_hat_by_k"][k] for name, row in report["by_source"].items()}
    return {**found, "all": report["by_k"][k]["k_hat"]}


def _record(output: Any, category: str) -> Record:
    answer = output.outputs[0]
    return Record(
        list(output.prompt_token_ids), list(answer.token_ids), answer.finish_reason, category
    )


def format_rows(rows: dict[str, dict[str, Any]]) -> str:
    """The table: a line a category."""
    lines = [
        f"{'category':<16}{'prompts':>8}{'tokens':>8}{'a step':>8}{'k-hat':>8}{'walk':>7}"
        f"{'ratio':>7}  acceptance by position"
    ]
    for category, row in rows.items():
        shares = " ".join(f"{n / row['num_drafts']:.3f}" for n in row["accepted_per_position"])
        walk = (
            f"{row['walk']:>7.3f}{row['walk_over_served']:>7.3f}" if "walk" in row else f"{'':>14}"
        )
        lines.append(
            f"{category:<16}{row['prompts']:>8}{row['tokens']:>8}{row['tokens_per_step']:>8.3f}"
            f"{row['mean_accepted_block']:>8.3f}{walk}  {shares}"
        )
    return "\n".join(lines)


def read_categories(path: Path | None) -> dict[str, list[str]]:
    """Prompts by category, in file order. Raises HeadsError for a file that holds none."""
    if path is None:
        from vllm_bpd.demo.prompts import PROMPTS

        return {"demo": list(PROMPTS)}
    found: dict[str, list[str]] = {}
    for where, record in read_json_lines(path, "a prompt file"):
        turns = record.get("turns")
        prompt = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
        category = record.get("category", "all prompts")
        if not isinstance(prompt, str) or not isinstance(category, str):
            raise HeadsError(
                f"prompts: {where}: found {shown(record)}; expected a text `prompt`, or texts "
                "`turns`, and as `category` a text or nothing"
            )
        found.setdefault(category, []).append(prompt)
    if not found:
        raise HeadsError(f"prompts: {path}: found no line; expected one prompt a line")
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
    run_command(main)
