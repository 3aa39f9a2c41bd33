"""`make bench`: every drafter a user could pick without a second model, against each other.

All contenders' servers stand ready in one machine and take turns: at each level of concurrency,
round after round, each answers the same prompts, a new choice of them every round, and who begins
rotates. vLLM's own benchmark client sends them. Only ratios within a round are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.acceptance import read_categories
from benchmarks.bench_report import as_markdown, ready_table, write_plot
from benchmarks.client import measure
from benchmarks.contenders import PLAIN, Contender, contenders
from benchmarks.live_server import LiveServer, require_memory
from vllm_bpd.arguments import at_least_one, output_folder, run_command
from vllm_bpd.errors import HeadsError

_FEWEST = 12  # requests of a load, at least, however few at once


def main() -> None:
    """Serve, measure, print the table, write raw results and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--prompts", type=Path, help="JSONL (default: the demo's prompts)")
    parser.add_argument("--target", help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", help="folder or hub id of heads (default: found for target)")
    parser.add_argument("--tuned", type=Path, help="what `vllm-bpd tune` wrote; one more contender")
    parser.add_argument("--only", nargs="+", help="names of contenders; the others stay out")
    parser.add_argument("--concurrency", type=at_least_one, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument(
        "--max-tokens", type=at_least_one, default=128, help="longest answer, tokens"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens")
    parser.add_argument("--serve", default="", help="further options of every `vllm serve`")
    parser.add_argument("--seed", type=int, default=0, help="draws prompts")
    parser.add_argument("--output", type=output_folder, default="build/bench", help="folder")
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """The measurement itself; results are written as they come."""
    from vllm_bpd.demo_target import export_demo_target

    found = _taking_part(arguments)
    texts = [text for group in read_categories(arguments.prompts).values() for text in group]
    random.Random(arguments.seed).shuffle(texts)
    target = arguments.target or str(export_demo_target())
    options = [
        "--dtype", arguments.dtype, "--max-model-len", str(arguments.max_model_len),
        "--max-num-seqs", str(max(arguments.concurrency)),
        # A load whose prompts were seen at another level would have nothing to prefill.
        "--no-enable-prefix-caching",
        *shlex.split(arguments.serve),
    ]  # fmt: skip
    servers: list[LiveServer] = []
    ready: dict[str, dict[str, float]] = {}
    try:
        for one in found:
            log = arguments.output / f"{one.name.replace(', ', '-').replace(' ', '-')}.log"
            servers.append(LiveServer(one, target, options, log))
            # One after another: compiling at once takes longer.
            ready[one.name] = {"ready_seconds": servers[-1].wait()}
            print(f"{one.name}: ready", flush=True)
        _first_requests(servers, target, texts)
        require_memory(Path("/proc/meminfo").read_text())
        for server in servers:
            ready[server.contender.name]["memory_mib"] = server.memory_mib()
        rows = _take_turns(arguments, servers, target, texts, ready)
    finally:
        for server in servers:
            server.stop()
    table = as_markdown(rows) + "\n".join(ready_table(ready)) + "\n"
    print(table)
    (arguments.output / "bench.md").write_text(table, encoding="utf-8")
    write_plot(arguments.output / "bench.svg", rows)


def _taking_part(arguments: argparse.Namespace) -> list[Contender]:
    """The contenders asked for that are installed. Raises HeadsError for names that are none."""
    known = {one.name: one for one in contenders(arguments.heads, arguments.tuned)}
    only = arguments.only or list(known)
    for name in only:
        if name not in known:
            raise HeadsError(
                f"only: found {name!r}; expected some of {', '.join(map(repr, known))}"
            )
    if PLAIN not in only:
        raise HeadsError(f"only: found no {PLAIN!r}; expected it, as all are compared with it")
    for one in known.values():
        if one.missing:
            print(one.missing)
    return [one for one in known.values() if one.name in only and not one.missing]


def _first_requests(servers: list[LiveServer], target: str, texts: list[str]) -> None:
    """They pay for lazy set-up, and are not counted."""
    with tempfile.TemporaryDirectory() as folder:
        for server in servers:
            measure(
                server.port, target, texts[:4], Path(folder),
                concurrency=4, max_tokens=16, temperature=0.0,
            )  # fmt: skip


def _take_turns(
    arguments: argparse.Namespace,
    servers: list[LiveServer],
    target: str,
    texts: list[str],
    ready: dict[str, dict[str, float]],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    taken = 0
    with tempfile.TemporaryDirectory() as folder:
        for temperature in arguments.temperatures:
            for concurrency in arguments.concurrency:
                for number in range(arguments.rounds):
                    count = max(_FEWEST, 2 * concurrency)
                    load = [texts[(taken + i) % len(texts)] for i in range(count)]
                    taken += count
                    first = number % len(servers)
                    for server in servers[first:] + servers[:first]:
                        figures = measure(
                            server.port, target, load, Path(folder), concurrency=concurrency,
                            max_tokens=arguments.max_tokens, temperature=temperature,
                        )  # fmt: skip
                        rows.append(
                            {
                                "contender": server.contender.name,
                                "concurrency": concurrency,
                                "temperature": temperature,
                                "round": number,
                                **figures,
                            }
                        )
                _write(arguments, servers, rows, ready)
                print(f"temperature {temperature:g}, {concurrency} at once: measured", flush=True)
    return rows


def _write(
    arguments: argparse.Namespace,
    servers: list[LiveServer],
    rows: list[dict[str, Any]],
    ready: dict[str, dict[str, float]],
) -> None:
    """Raw results so far, with what made them."""
    speculative = {server.contender.name: server.contender.speculative for server in servers}
    results = {
        "command": {
            "concurrency": arguments.concurrency,
            "rounds": arguments.rounds,
            "max_tokens": arguments.max_tokens,
            "dtype": arguments.dtype,
            "prompts": arguments.prompts.name if arguments.prompts else "the demo's",
            "seed": arguments.seed,
            "serve": arguments.serve,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-bpd")},
        "speculative_config": speculative,
        "ready": ready,
        "rows": rows,
    }
    path = arguments.output / "bench.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
