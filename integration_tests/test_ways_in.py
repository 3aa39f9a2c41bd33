"""Every documented way to ask for `bpd`, against the real parser and a real engine (0.32, V1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.combos import COMBOS
from integration_tests.harness.engine_process import REPOSITORY, engine_environment
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import make_prompts
from integration_tests.harness.targets import TARGETS, write_target

NUM_HEADS = 3
MAX_TOKENS = 12
LLM_OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
BASE = [
    "--max-model-len=64", "--max-num-seqs=4", "--dtype=float32", "--enforce-eager",
    "--skip-tokenizer-init",
]  # fmt: skip


def answered(folder: Path, ways: dict[str, Any], base: list[str]) -> dict[str, Any]:
    """The replies of one process that tries all `ways`."""
    request = folder / "request.json"
    prompt = make_prompts([7], 128)[0]
    request.write_text(
        json.dumps({"base": base, "prompt": prompt, "max_tokens": MAX_TOKENS, "ways": ways})
    )
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.harness.ways_in", str(request)],
        env=engine_environment(COMBOS[0]),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPLIES ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    replies: dict[str, Any] = json.loads(lines[0].removeprefix("REPLIES "))
    return replies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with heads inside it, as `bpd_heads/`, and other heads beside it."""
    root = tmp_path_factory.mktemp("ways")
    target = write_target(TARGETS["llama"], root / "target")
    write_heads(target, target / "bpd_heads", NUM_HEADS)
    write_heads(target, root / "other", 2)
    return root


@pytest.fixture(scope="module")
def replies(folder: Path) -> dict[str, Any]:
    """One engine for each way in."""
    target, other = str(folder / "target"), str(folder / "other")
    word = folder / "word.yaml"
    word.write_text("speculative-config: bpd\n")
    nested = folder / "nested.yaml"
    nested.write_text(f"speculative-config:\n  method: bpd\n  model: {other}\n")
    llm = {"model": target, **LLM_OPTIONS}
    named = json.dumps({"method": "bpd", "model": other, "num_speculative_tokens": 1})
    ways = {
        "none": {"argv": []},
        "word": {"argv": ["--speculative-config", "bpd"]},
        "json": {"argv": ["--speculative-config", named]},
        "dotted": {
            "argv": ["--speculative-config.method", "bpd", "--speculative-config.model", other]
        },
        "short flags": {
            "argv": ["--spec-method", "bpd", "--spec-model", other, "--spec-tokens", "1"]
        },
        "yaml word": {"argv": ["--config", str(word)]},
        "yaml nested": {"argv": ["--config", str(nested)]},
        "offline word": {"llm": {**llm, "speculative_config": "bpd"}},
        "offline dict": {"llm": {**llm, "speculative_config": {"method": "bpd", "model": other}}},
        "too many": {"argv": ["--spec-method", "bpd", "--spec-tokens", "4"]},
        "too many offline": {
            "llm": {**llm, "speculative_config": {"method": "bpd", "num_speculative_tokens": 4}}
        },
    }
    return answered(folder, ways, ["--model", target, *BASE])


@pytest.mark.parametrize(
    ("way", "drafts"),
    [
        ("word", NUM_HEADS),
        ("json", 1),
        ("dotted", 2),
        ("short flags", 1),
        ("yaml word", NUM_HEADS),
        ("yaml nested", 2),
        ("offline word", NUM_HEADS),
        ("offline dict", 2),
    ],
)
def test_way_in(replies: dict[str, Any], way: str, drafts: int) -> None:
    """It serves the target's own text, says `bpd`, and drafts what the heads found say."""
    reply = replies[way]
    assert "error" not in reply, reply
    assert reply["ids"] == replies["none"]["ids"]
    assert len(reply["ids"]) == MAX_TOKENS
    assert reply["method"] == "bpd"
    assert reply["drafts"] == drafts
    assert "bpd" in reply["said"]
    assert replies["none"]["method"] is None


@pytest.mark.parametrize("way", ["too many", "too many offline"])
def test_more_drafts_than_heads_are_refused(replies: dict[str, Any], way: str) -> None:
    """In one line; on the command line it is the exit message, not a traceback."""
    reply = replies[way]
    assert "num_speculative_tokens: found 4" in reply["error"]
    assert "has 3 heads" in reply["error"]
    assert "\n" not in reply["error"]
    assert reply.get("exit", False) == (way == "too many")
