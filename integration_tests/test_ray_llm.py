"""The examples for Ray Serve LLM and Ray Data LLM, with the real libraries, on CPU engines.

Their answers are compared with those that vLLM itself gives offline without speculation, in
float32. The engine is vLLM 0.29, which Ray 2.60 pins, on model runner V1.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.harness import ray_llm
from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import make_job
from integration_tests.harness.releases import ReleaseError
from integration_tests.harness.targets import TARGETS, write_target

MISSING = ray_llm.missing()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=f"needs the extra ray-llm ({', '.join(MISSING)})"),
]

MAX_TOKENS = 80
PROMPTS = [f"{number} ways to see the moon over the hills" for number in range(6)]
# Ray Data's prompts go through the chat template, which puts a newline behind a message.
CHATS = [f"Say what {number} and {number} makes, and then go on" for number in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(TARGETS["think"], tmp_path_factory.mktemp("ray") / "target")


@pytest.fixture(scope="module")
def heads(target: Path) -> Path:
    """Random heads without a lattice, which each replica that starts would have to compile."""
    return write_heads(target, target.parent / "heads", 4)


@pytest.fixture(scope="module")
def offline(target: Path) -> dict[str, str]:
    """What the target alone answers, without Ray and without speculation: prompt to text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [*PROMPTS, *(f"{chat}\n" for chat in CHATS)]
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS}
    requests = [{"prompt": tokenizer(text)["input_ids"], "sampling": sampling} for text in texts]
    try:
        process = EngineProcess(ray_llm.COMBO, target.parent / "offline.log")
    except ReleaseError as reason:
        pytest.skip(str(reason))
    llm = {**ray_llm.ENGINE, "skip_tokenizer_init": False}
    try:
        reply = process.run(make_job(target, [{"requests": requests}], **llm))
    finally:
        process.close()
    assert reply["ok"], reply["trace"]
    [batch] = reply["batches"]
    assert batch["spec"]["drafts"] == 0
    answers = [output["completions"][0]["text"] for output in batch["outputs"]]
    assert len(set(answers)) > len(answers) // 2  # they tell one prompt from another
    return dict(zip(texts, answers, strict=True))


@pytest.fixture(scope="module")
def served(target: Path, heads: Path, offline: dict[str, str]) -> Iterator[ray_llm.Served]:
    options = ["--heads", str(heads), "--engine-kwargs", json.dumps(ray_llm.ENGINE)]
    options += ["--max-replicas", "2", "--requests-per-replica", "2"]
    with ray_llm.serving(target, target.parent / "serve.log", options) as app:
        yield app


def wait_for(what: str, seconds: float, holds: object) -> None:
    """Return once `holds()` is true; fails after `seconds`."""
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(2)


class Load:
    """Clients that ask one question after another until told to stop."""

    def __init__(self, app: ray_llm.Served, clients: int) -> None:
        self.app = app
        self.ended = threading.Event()
        self.outcomes: list[tuple[str, int, str]] = []  # prompt, status, text
        self.hung: list[str] = []
        self.threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(clients)]

    def ask(self, first: int) -> None:
        place = first
        while not self.ended.is_set():
            prompt = PROMPTS[place % len(PROMPTS)]
            try:
                self.outcomes.append((prompt, *self.app.complete(prompt, MAX_TOKENS)))
            except TimeoutError as error:
                self.hung.append(str(error))
            place += 1

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def test_serve_answers_as_vllm_does_offline(
    served: ray_llm.Served, offline: dict[str, str]
) -> None:
    for prompt in PROMPTS:
        assert served.complete(prompt, MAX_TOKENS) == (200, offline[prompt])
    wait_for("no drafts were counted", 60, lambda: served.counter("drafts") > 0)
    assert served.counter("draft_tokens") > served.counter("drafts")
    assert served.counter("accepted_tokens") < served.counter("draft_tokens")


def test_serve_scales_out_under_load(served: ray_llm.Served, offline: dict[str, str]) -> None:
    wait_for("no replica is healthy", 60, lambda: served.healthy() == 1)  # gathered now and then
    with Load(served, 4) as load:
        wait_for("one replica", 300, lambda: len(served.replicas()) == 2)
    assert not load.hung
    assert all((status, text) == (200, offline[prompt]) for prompt, status, text in load.outcomes)
    # It starts sooner on an idle machine, and Ray keeps it for ten minutes without load.
    wait_for("one replica answers", ray_llm.SECONDS, lambda: served.healthy() == 2)


def test_a_replica_that_dies_loses_at_most_its_own_requests(
    served: ray_llm.Served, offline: dict[str, str]
) -> None:
    """A request is answered rightly or fails with a status; none hangs, later ones are served."""
    wait_for("two replicas are not healthy", 60, lambda: served.healthy() == 2)
    with Load(served, 4) as load:
        wait_for("no answer", 120, lambda: len(load.outcomes) >= 8)
        victim = served.replicas()[0]
        os.kill(victim, signal.SIGKILL)
        seen = len(load.outcomes)
        wait_for("no answer since a replica died", 300, lambda: len(load.outcomes) >= seen + 24)
    assert not load.hung
    for prompt, status, text in load.outcomes:
        assert status >= 500 or (status, text) == (200, offline[prompt])
    assert victim not in served.replicas()
    failed = sum(status != 200 for _, status, _ in load.outcomes)
    assert failed <= len(load.threads)  # each client had one request under way
    wait_for("one replica", ray_llm.SECONDS, lambda: served.healthy() == 2)
    for prompt in PROMPTS:
        assert served.complete(prompt, MAX_TOKENS) == (200, offline[prompt])


def test_data_answers_as_vllm_does_offline(
    target: Path, heads: Path, offline: dict[str, str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in CHATS))
    options = ["--model", str(target), "--prompts", str(prompts)]
    options += ["--output", str(tmp_path / "answers"), "--max-tokens", str(MAX_TOKENS), "--cpu"]
    options += ["--engine-kwargs", json.dumps(ray_llm.ENGINE)]
    # Ray Data does not say what its engine drafted; that it drafts with these heads, others show.
    others = write_target(TARGETS["llama"], tmp_path / "other")
    foreign = write_heads(others, tmp_path / "foreign", 4)
    with pytest.raises(ray_llm.RayLlmError, match="these heads belong to another target"):
        ray_llm.run_to_end(
            "ray_data_llm", [*options, "--heads", str(foreign)], tmp_path / "refused.log"
        )
    ray_llm.run_to_end("ray_data_llm", [*options, "--heads", str(heads)], tmp_path / "data.log")
    rows = [
        json.loads(line)
        for path in (tmp_path / "answers").iterdir()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert answers == {chat: offline[f"{chat}\n"] for chat in CHATS}
