"""README's commands for several GPUs, run as they stand there, with CPU workers in place of GPUs.

`python -m integration_tests.distributed.readme_commands` serves a small float32 target by each of
them and by `vllm serve MODEL` alone, sends the same prompts, and compares ids and counters. What
is added to a line is only what a small float32 target, a free port and one machine want. Figures
go to benchmarks/results/readme-commands.json; the exit status says whether all were equal.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration_tests.distributed.cases import environment
from integration_tests.distributed.test_executors import (
    BASE,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    NUM_HEADS,
    PLACES,
    PROMPTS,
)
from integration_tests.harness.combos import Combo
from integration_tests.harness.engine_process import REPOSITORY
from integration_tests.harness.heads import write_chain_heads
from integration_tests.harness.server import Server, free_port
from integration_tests.harness.targets import TARGETS, TEXT_VOCAB, write_target

OUTPUT = REPOSITORY / "benchmarks" / "results" / "readme-commands.json"
SECTION = re.compile(r"^## Across GPUs\n(.*?)^## ", flags=re.MULTILINE | re.DOTALL)
ALONE = "vllm serve MODEL"
ONE_PROCESS = "vllm serve MODEL --speculative-config bpd"
# One machine is both of Ray's nodes, each with one pretended GPU.
NODE = "--num-gpus 1 --num-cpus 2 --disable-usage-stats"
FIRST_NODE = f"--node-ip-address 127.0.0.1 --include-dashboard false {NODE}"
MORE = f"--dtype float32 --max-model-len {MAX_MODEL_LEN}"


def commands() -> list[str]:
    """The section's lines, in order."""
    section = SECTION.search((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert section is not None
    return re.findall(r"^\$ (.*)$", section[1], flags=re.MULTILINE)


def runner_of(line: str) -> str:
    """The model runner that a command is run on: V2 for stages."""
    return "V2" if "--pipeline-parallel-size" in line else "V1"


def variables(line: str, runner: str) -> dict[str, str]:
    """The environment of a command, with pretended GPUs for Ray."""
    on_ray = "ray" in line.split()
    made = environment(Combo(BASE.release, runner), on_ray)
    made["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{made['PATH']}"
    if on_ray:
        made["RAY_ADDRESS"] = "127.0.0.1:6379"
    return made


def start_node(line: str, folder: Path) -> None:
    """Run a `ray start` line of the section."""
    line = line.replace("FIRST_MACHINE", "127.0.0.1")
    line += f" {FIRST_NODE if '--head' in line else NODE}"
    environment_of_node = variables(line, "V1")
    environment_of_node.pop("RAY_ADDRESS")
    subprocess.run(
        shlex.split(line), env=environment_of_node, cwd=folder, check=True, capture_output=True
    )


def serve(line: str, runner: str, target: Path, folder: Path) -> dict[str, Any]:
    """Ids that a server started by `line` answers, and its speculative counters."""
    port = free_port()
    command = f"{line.replace('MODEL', str(target))} {MORE} --port {port}"
    log = folder / f"{len(list(folder.iterdir()))}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            shlex.split(command),
            env=variables(line, runner),
            cwd=folder,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    server = Server(BASE, process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_healthy()
        ids = [complete(server.url, str(target), prompt) for prompt in PROMPTS]
        found = {"command": line, "model runner": runner, "ids": ids}
        return found | {"counters": counters(server.url)}
    finally:
        server.stop()


def complete(url: str, model: str, prompt: list[int]) -> list[int]:
    """The ids that a prompt is answered with, greedily; one request at a time drafts alike."""
    asked = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0,
             "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        found: list[int] = json.load(response)["choices"][0]["token_ids"]
    return found


def counters(url: str) -> dict[str, int]:
    """The speculative counters of all replicas together."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = {}
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        values = re.findall(rf"^vllm:spec_decode_num_{name}_total\{{.*\}} (\S+)$", text, re.M)
        found[name] = int(sum(map(float, values)))
    return found


def main() -> int:
    """Try every line; 1 if one answered or drafted otherwise."""
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        target = write_target(TARGETS["settled"], root / "target")
        write_chain_heads(
            target,
            target / "bpd_heads",
            NUM_HEADS,
            places=PLACES,
            draft_vocab_size=TEXT_VOCAB - 2,
        )
        (folder := root / "run").mkdir()
        plain = serve(ALONE, "V1", target, folder)
        assert not any(plain["counters"].values())
        one = {runner: serve(ONE_PROCESS, runner, target, folder) for runner in ("V1", "V2")}
        rows = list(one.values())
        try:
            for line in commands():
                if line.startswith("ray start"):
                    start_node(line, folder)
                    continue
                rows.append(serve(line, runner_of(line), target, folder))
        finally:
            subprocess.run(
                [str(Path(sys.executable).with_name("ray")), "stop", "--force"],
                capture_output=True,
                check=False,
            )
    for row in rows:
        row["ids equal"] = row.pop("ids") == plain["ids"]
        row["counters equal"] = row["counters"] == one[row["model runner"]]["counters"]
        wrong += not (row["ids equal"] and row["counters equal"])
        print(json.dumps(row), flush=True)
    found = {
        "command": "python -m integration_tests.distributed.readme_commands",
        "versions": {name: version(name) for name in ("vllm", "torch", "ray")},
        "requests": len(PROMPTS),
        "rows": rows,
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
