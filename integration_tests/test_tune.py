"""Drafting that follows the batch size, and `vllm-bpd tune`, which finds out how (0.32, V1)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.combos import COMBOS
from integration_tests.harness.engine_process import (
    INTERPRET,
    EngineProcess,
    engine_environment,
)
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import greedy, make_job, make_prompts, run, token_ids
from integration_tests.harness.targets import TARGETS, write_target
from vllm_bpd.tune import DRAFTS, SETTINGS

PLACES, MAX_TOKENS = 5, 40
# Repeating prompts; the requests end one after another, so that the batch shrinks step by step.
PROMPTS = [prompt * 3 for prompt in make_prompts((5, 6, 7, 8, 9, 10), TARGETS["text"].vocab)]
ENGINE = {"max_model_len": 160, "max_num_seqs": 8}
SIZES = ["1", "4"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer."""
    return write_target(TARGETS["text"], tmp_path_factory.mktemp("text") / "target")


@pytest.fixture(scope="module")
def heads(target: Path) -> Path:
    """Random heads with a lattice."""
    return write_heads(target, target / "bpd_heads", 2, places=PLACES)


def batch() -> dict[str, Any]:
    """Requests of different lengths, greedy."""
    requests = [
        {
            "prompt": prompt,
            "sampling": {"temperature": 0, "max_tokens": MAX_TOKENS - 5 * i, "ignore_eos": True},
        }
        for i, prompt in enumerate(PROMPTS)
    ]
    return {"requests": requests, "drafts": "heads"}


def ids(reply: dict[str, Any]) -> list[list[int]]:
    """The ids of every request."""
    outputs = reply["batches"][0]["outputs"]
    return [output["completions"][0]["token_ids"] for output in outputs]


@pytest.mark.row("drafts fewer than heads")
def test_drafting_follows_the_batch_size(engine: EngineProcess, target: Path, heads: Path) -> None:
    """Heads, then the text alone, then nothing, as the batch shrinks from six to one."""
    if engine.combo.runner != "V1":
        pytest.skip("model runner V2 verifies a fixed number of drafts a step")
    plain = run(engine, make_job(target, [batch()], **ENGINE))
    always = {"method": "bpd", "model": str(heads), "min_confidence": 0.0}
    by_size = always | {
        "min_confidence_per_batch_size": [[1, 2, 1.0], [3, 4, 0.0], [5, 8, 0.3]],
        "heads_up_to_batch_size": 3,
    }
    drafted = {}
    for name, config in {"always": always, "by size": by_size}.items():
        reply = run(engine, make_job(target, [batch()], speculative_config=config, **ENGINE))
        assert ids(reply) == ids(plain)
        drafted[name] = reply["batches"][0]["spec"]["drafted"]
    assert 0 < drafted["by size"] < drafted["always"] / 2


def tuned(folder: Path, runner: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `vllm-bpd tune` does with these arguments, model runner V1 or V2."""
    environment = engine_environment(COMBOS[runner - 1])
    if runner == 2:
        environment["PYTHONPATH"] = os.pathsep.join([INTERPRET, environment["PYTHONPATH"]])
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return subprocess.run(
        [str(Path(sys.executable).with_name("vllm-bpd")), "tune", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


def test_tune_writes_a_config_that_serves(
    target: Path, heads: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every setting measured for every size; the file is a speculative config as it stands."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {w} {w}"}) + "\n" for w in ("a", "b")))
    done = tuned(
        tmp_path, 1, str(target), "--prompts", str(prompts), "--batch-sizes", *SIZES,
        "--rounds", "1", "--max-tokens", "6", "--max-model-len", "128", "--max-num-seqs", "16",
        "--enforce-eager", "--results", "raw.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    config = json.loads((tmp_path / "bpd-tuned.json").read_text())
    assert config["method"] == "bpd"
    ranges = config["min_confidence_per_batch_size"]
    assert (ranges[0][0], ranges[-1][1]) == (1, 16)
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert list(raw["tokens_per_second"]) == SIZES
    for speeds in raw["tokens_per_second"].values():
        assert list(speeds) == [str(setting) for setting in SETTINGS]
    engine = EngineProcess(COMBOS[0], tmp_path_factory.mktemp("tuned") / "log")
    try:
        job = make_job(target, [greedy(PROMPTS, 4)], speculative_config=config, **ENGINE)
        assert len(token_ids(run(engine, job)["batches"][0])) == len(PROMPTS)
    finally:
        engine.close()


def test_tune_refuses_what_it_cannot_read_in_one_line(
    target: Path, heads: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "no prompt"}\n')
    done = tuned(tmp_path, 1, str(target), "--prompts", "bad.jsonl")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "vllm-bpd tune: error: prompts: bad.jsonl:1: expected an object with a text `prompt`"
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bpd-tuned.json").exists()


@pytest.mark.full
def test_tune_on_model_runner_v2_finds_numbers_of_drafts(
    target: Path, heads: Path, tmp_path: Path
) -> None:
    """An engine for each number of drafts, interpreted: minutes."""
    done = tuned(
        tmp_path, 2, str(target), "--batch-sizes", "1", "2", "--rounds", "1", "--max-tokens", "4",
        "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager", "--results", "raw.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    config = json.loads((tmp_path / "bpd-tuned.json").read_text())
    schedule = config["num_speculative_tokens_per_batch_size"]
    assert (schedule[0][0], schedule[-1][1]) == (1, 4)
    speeds = json.loads((tmp_path / "raw.json").read_text())["tokens_per_second"]
    assert list(speeds["1"]) == [str(count) for count in DRAFTS if count <= PLACES]
