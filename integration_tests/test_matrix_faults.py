"""Rows metrics, abort and faults, against servers: counters, dropped streams, a worker killed."""

from __future__ import annotations

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
from integration_tests.harness.oracle import Counts, chain, draft_room
from integration_tests.harness.releases import ReleaseError, find_release
from integration_tests.harness.server import Server, serving
from integration_tests.harness.statistics import bigram_logits
from integration_tests.harness.targets import TEXT_VOCAB
from integration_tests.soak import connect

MAX_MODEL_LEN = 512
NUM_HEADS = 4
OPTIONS = [
    "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16",
    "--num-gpu-blocks-override", "256",
]  # fmt: skip
# Interpreted kernels are slow: fewer and shorter streams there.
STREAMS = {"V1": (32, 200), "V2": (8, 24)}


@pytest.fixture(scope="module")
def options(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The server's options, with heads that draft just what mostly follows."""
    folder = tmp_path_factory.mktemp("faults") / "heads"
    heads = write_chain_heads(targets["settled"], folder, NUM_HEADS, width=2 * TEXT_VOCAB)
    return [*OPTIONS, "--spec-method", "bpd", "--spec-model", str(heads)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(combo, id=combo.name, marks=[] if combo == COMBOS[0] else [pytest.mark.full])
        for combo in COMBOS
    ],
)
def server(
    request: pytest.FixtureRequest,
    targets: dict[str, Path],
    options: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A running server of each release and model runner."""
    combo: Combo = request.param
    log = tmp_path_factory.mktemp("server") / "log.txt"
    try:
        find_release(combo.release)
    except ReleaseError as reason:
        pytest.skip(str(reason))
    with serving(combo, targets["settled"], log, options) as running:
        yield running


def complete(client: OpenAI, prompt: list[int], **more: Any) -> str:
    """One greedy answer of twelve tokens."""
    body = {"ignore_eos": True, **more}
    answer = client.completions.create(
        model="served", prompt=prompt, temperature=0, max_tokens=12, extra_body=body
    )
    return answer.choices[0].text


def counted(server: Server) -> Counts:
    """What /metrics says of drafts."""
    found = {name: int(value) for name, value in server.metrics().items() if "spec_dec" in name}
    prefix = "spec_decode_num_"
    return Counts(
        NUM_HEADS,
        found.get(f"{prefix}drafts_total", 0),
        found.get(f"{prefix}draft_tokens_total", 0),
        found.get(f"{prefix}accepted_tokens_total", 0),
        [found.get(f"{prefix}accepted_tokens_per_pos_total[{n}]", 0) for n in range(NUM_HEADS)],
    )


def walk(counts: Counts, prompt: list[int], answer: list[int], successors: list[list[int]]) -> None:
    """Count one request by hand: its answer, and heads that draft chains of successors.

    A block is cut at the context's end, which is where the answer ends, too.
    """
    done = 1
    while done < len(answer) and len(prompt) + done < MAX_MODEL_LEN:
        drafts = chain([*prompt, *answer[:done]], successors, NUM_HEADS)
        room = draft_room(len(prompt) + done, NUM_HEADS, MAX_MODEL_LEN)
        right = 0
        while right < room and done + right < len(answer) and drafts[right] == answer[done + right]:
            right += 1
        if room > 0:
            counts.verify(room, right)
        done += right + 1


@pytest.mark.row("metrics")
def test_metrics_by_hand(server: Server, targets: dict[str, Path]) -> None:
    """Drafts, their tokens, those accepted, in all and by position: /metrics against paper.

    Requests end at the context's end, where a block is cut and none of it lies behind the answer.
    """
    client = connect(server)
    prompts = make_prompts([MAX_MODEL_LEN - n for n in (30, 23, 19, 12, 2, 1)], TEXT_VOCAB, seed=73)
    best_V = bigram_logits(targets["settled"]).argmax(dim=-1).tolist()
    successors = [[best, best] for best in best_V]
    before, expected = counted(server), Counts(NUM_HEADS)

    def ask(prompt: list[int]) -> list[int]:
        answer = client.completions.create(
            model="served", prompt=prompt, temperature=0, max_tokens=MAX_MODEL_LEN - len(prompt),
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        ids: list[int] = (answer.choices[0].model_extra or {})["token_ids"]
        return ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(prompt) + len(answer) == MAX_MODEL_LEN
        walk(expected, prompt, answer, successors)
    after = counted(server)
    assert 0 < expected.accepted < expected.drafted
    assert after.drafts - before.drafts == expected.drafts
    assert after.drafted - before.drafted == expected.drafted
    assert after.accepted - before.accepted == expected.accepted
    by_position = zip(after.per_position, before.per_position, strict=True)
    assert [late - early for late, early in by_position] == expected.per_position


@pytest.mark.row("abort")
def test_dropped_streams_leave_nothing_behind(server: Server) -> None:
    """Many streams, half of them closed early: the server answers, and nothing runs on."""
    client = connect(server)
    streams, length = STREAMS[server.combo.runner]
    prompts = make_prompts([6] * streams, TEXT_VOCAB, seed=71)
    before = complete(client, prompts[0])

    def stream(row: int) -> None:
        with client.completions.create(
            model="served", prompt=prompts[row], max_tokens=length, stream=True, temperature=0,
            extra_body={"ignore_eos": True},
        ) as chunks:  # fmt: skip
            for number, _ in enumerate(chunks):
                if row % 2 and number > row % 7:
                    return

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(stream, range(streams)))
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
    # Drawing needs a device library in 0.29, which the interpreter has not.
    temperature = 1.0 if server.combo.runner == "V1" else 0.0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            client.completions.create, model="served", prompt=prompt, max_tokens=490,
            temperature=temperature, extra_body={"ignore_eos": True},
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
