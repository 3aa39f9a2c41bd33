"""`vllm serve MODEL --speculative-config bpd`, the real model, talked to with the openai client."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from integration_tests.harness.engine_process import REPOSITORY
from vllm_bpd.demo_target import export_demo_target

START_SECONDS = 420  # for a slow, busy machine
QUESTIONS = [f"Name {n} things that are {colour}." for n in (2, 3) for colour in
             ("red", "blue", "green", "yellow")]  # fmt: skip


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a running server; its log is shown if it does not start."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log.txt"
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(export_demo_target()),
        "--speculative-config", "bpd", "--served-model-name", "smol", "--host", "127.0.0.1",
        "--port", str(port), "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdout=sink, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server answers; fail with its log if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-6000:]}")


def client(url: str) -> OpenAI:
    """An openai client for the server."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)


def counters(url: str) -> dict[str, float]:
    """The speculation counters on /metrics: name, with the position where there is one."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = {}
    for line in text.splitlines():
        match = re.match(r"vllm:spec_decode_(\w+?)_total\{(.*)\} (\S+)$", line)
        if match:
            position = re.search(r'position="(\d+)"', match[2])
            name = match[1] + (f"[{position[1]}]" if position else "")
            found[name] = float(match[3])
    return found


def chat(url: str, question: str) -> str:
    """One greedy chat answer."""
    answer = client(url).chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
    )
    return answer.choices[0].message.content or ""


def test_chat_streams_what_it_says_at_once(server: str) -> None:
    """Streaming and not, the text is the same."""
    question = "What is the capital of France?"
    stream = client(server).chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == chat(server, question)
    assert "Paris" in streamed


def test_completions_and_their_count(server: str) -> None:
    """The completions endpoint gives as many tokens as asked for."""
    answer = client(server).completions.create(
        model="smol", prompt="One, two, three, four,", temperature=0, max_tokens=16
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert "five" in answer.choices[0].text


@pytest.mark.row("metrics", combo="0.32-V1")
def test_eight_at_once_and_the_metrics(server: str) -> None:
    """Eight requests together; /metrics counts their drafts, in all and by position."""
    before = counters(server)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda question: chat(server, question), QUESTIONS))
    assert all(answers)
    after = counters(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["num_drafts"] > 0
    assert 0 < grown["num_accepted_tokens"] < grown["num_draft_tokens"]
    by_position = [
        grown[name] for name in sorted(grown) if name.startswith("num_accepted_tokens_per_pos[")
    ]
    assert len(by_position) == 8  # places of the shipped lattice
    assert sum(by_position) == grown["num_accepted_tokens"]
    assert by_position == sorted(by_position, reverse=True)
