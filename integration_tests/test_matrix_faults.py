"""Rows abort and faults, against a server: dropped streams, a worker killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIError, OpenAI

from integration_tests.harness.combos import COMBOS, Combo
from integration_tests.harness.heads import write_chain_heads
from integration_tests.harness.jobs import make_prompts
from integration_tests.harness.server import Server, serving
from integration_tests.harness.targets import TEXT_VOCAB
from integration_tests.soak import connect

V1 = tuple(combo for combo in COMBOS if combo.runner == "V1")
OPTIONS = [
    "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16",
    "--num-gpu-blocks-override", "256",
]  # fmt: skip


@pytest.fixture(scope="module")
def options(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The server's options, with heads that are often right."""
    heads = write_chain_heads(targets["settled"], tmp_path_factory.mktemp("faults") / "heads", 4)
    return [*OPTIONS, "--spec-method", "bpd", "--spec-model", str(heads)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            combo,
            id=combo.name,
            marks=[pytest.mark.row(combo=combo.name)]
            + ([] if combo == COMBOS[0] else [pytest.mark.full]),
        )
        for combo in V1
    ],
)
def server(
    request: pytest.FixtureRequest,
    targets: dict[str, Path],
    options: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A running server of each release, on model runner V1."""
    combo: Combo = request.param
    if combo != COMBOS[0] and importlib.util.find_spec("orjson") is None:
        pytest.skip("`vllm serve` of 0.33 needs orjson, which an environment made for 0.32 lacks")
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serving(combo, targets["settled"], log, options) as running:
        yield running


def complete(client: OpenAI, prompt: list[int], **more: Any) -> str:
    """One greedy answer of twelve tokens."""
    body = {"ignore_eos": True, **more}
    answer = client.completions.create(
        model="served", prompt=prompt, temperature=0, max_tokens=12, extra_body=body
    )
    return answer.choices[0].text


@pytest.mark.row("abort")
def test_dropped_streams_leave_nothing_behind(server: Server) -> None:
    """Thirty-two streams, half of them closed early: the server answers, and nothing runs on."""
    client = connect(server)
    prompts = make_prompts([6] * 32, TEXT_VOCAB, seed=71)
    before = complete(client, prompts[0])

    def stream(row: int) -> None:
        with client.completions.create(
            model="served", prompt=prompts[row], max_tokens=200, stream=True, temperature=0,
            extra_body={"ignore_eos": True},
        ) as chunks:  # fmt: skip
            for number, _ in enumerate(chunks):
                if row % 2 and number > row % 7:
                    return

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(stream, range(32)))
    deadline = time.monotonic() + 60
    while server.metrics()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.5)
    metrics = server.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["spec_decode_num_accepted_tokens_total"] > 0
    assert complete(client, prompts[0]) == before


@pytest.mark.full
@pytest.mark.row("faults")
def test_a_worker_killed(
    server: Server, targets: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    """The client gets an error, not a hang; the server ends; started again, it serves. Last."""
    client = connect(server)
    prompt = make_prompts([6], TEXT_VOCAB, seed=72)[0]
    before = complete(client, prompt)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            client.completions.create, model="served", prompt=prompt, max_tokens=490,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not server.metrics()["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in workers(server):
            os.kill(child, signal.SIGKILL)
        with pytest.raises((APIError, APIConnectionError)):
            asked.result(timeout=120)
    server.process.wait(timeout=120)
    with serving(server.combo, targets["settled"], tmp_path / "again.log", options) as again:
        assert complete(connect(again), prompt) == before


def workers(server: Server) -> list[int]:
    """The processes of the server that hold the model: those whose name says so."""
    found = []
    for child in server.children():
        name = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
        if "VLLM" in name:
            found.append(child)
    assert found, "no worker process"
    return found
