"""Every way that README.md gives to ask for `bpd`, word for word; and what is refused.

Against the real parser and a real engine (0.32, V1).
"""

from __future__ import annotations

import ast
import json
import re
import shlex
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

NUM_HEADS = 4  # inside the target
OTHER_HEADS = 3  # the README's HEADS; it asks for 3 drafts
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
    write_heads(target, root / "other", OTHER_HEADS)
    return root


def readme_ways(target: str, heads: str, folder: Path) -> dict[str, Any]:
    """The README's `vllm serve` lines, YAML and `LLM(...)` calls, MODEL and HEADS filled in."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    text = text.replace("MODEL", target).replace("HEADS", heads)
    ways: dict[str, Any] = {}
    for line in re.findall(r"^\$ vllm serve (.*)$", text, flags=re.MULTILINE):
        if "-parallel-size" in line:  # integration_tests/distributed
            continue
        ways[f"serve {len(ways)}"] = {"argv": shlex.split(line)[1:]}
    for content in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        path = folder / f"{len(ways)}.yaml"
        path.write_text(content)
        ways[f"yaml {len(ways)}"] = {"argv": ["--config", str(path)]}
    for content in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM":
                arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
                llm = {"model": ast.literal_eval(node.args[0]), **LLM_OPTIONS, **arguments}
                ways[f"offline {len(ways)}"] = {"llm": llm}
    return ways


@pytest.fixture(scope="module")
def replies(folder: Path) -> dict[str, Any]:
    """One engine for each way in."""
    target, other = str(folder / "target"), str(folder / "other")
    word = folder / "word.yaml"
    word.write_text("speculative-config: bpd\n")
    too_many = {"method": "bpd", "num_speculative_tokens": NUM_HEADS + 1}
    ways = {
        **readme_ways(target, other, folder),
        "none": {"argv": []},
        "yaml word": {"argv": ["--config", str(word)]},
        "two ranks": {
            "llm": {
                "model": target,
                **LLM_OPTIONS,
                "speculative_config": "bpd",
                "tensor_parallel_size": 2,
            }
        },
        "two stages": {"argv": ["--speculative-config=bpd", "--pipeline-parallel-size=2"]},
        "fewer": {"argv": ["--spec-method", "bpd", "--spec-tokens", "1"]},
        "too many": {"argv": ["--speculative-config", json.dumps(too_many)]},
        "too many offline": {
            "llm": {"model": target, **LLM_OPTIONS, "speculative_config": too_many}
        },
    }
    return answered(folder, ways, ["--model", target, *BASE])


def check_served(reply: dict[str, Any], plain: dict[str, Any], drafts: int) -> None:
    """It gives the target's own text, says `bpd`, and drafts what the heads found say."""
    assert "error" not in reply, reply
    assert reply["ids"] == plain["ids"]
    assert len(reply["ids"]) == MAX_TOKENS
    assert reply["method"] == "bpd"
    assert reply["drafts"] == drafts
    assert "bpd" in reply["said"]


def test_every_way_of_the_readme(replies: dict[str, Any]) -> None:
    """Word for word."""
    drafts = {
        "serve 0": NUM_HEADS,  # the bare word
        "serve 1": 3,  # JSON, with a number
        "serve 2": OTHER_HEADS,  # dotted
        "serve 3": 3,  # short flags
        "serve 4": OTHER_HEADS,  # of the section on training
        "yaml 5": OTHER_HEADS,
        "offline 6": NUM_HEADS,
        "offline 7": OTHER_HEADS,
    }
    served = ("serve", "yaml 5", "offline 6", "offline 7")
    assert [name for name in replies if name.startswith(served)] == list(drafts)
    for name, expected in drafts.items():
        check_served(replies[name], replies["none"], expected)


@pytest.mark.parametrize(
    ("way", "drafts"), [("yaml word", NUM_HEADS), ("fewer", 1), ("two ranks", NUM_HEADS)]
)
def test_further_ways(replies: dict[str, Any], way: str, drafts: int) -> None:
    """The bare word in a YAML file; fewer drafts than heads; tensor parallelism."""
    check_served(replies[way], replies["none"], drafts)
    assert replies["none"]["method"] is None


def test_pipeline_stages_are_refused_on_v1(replies: dict[str, Any]) -> None:
    assert replies["two stages"]["exit"]
    assert replies["two stages"]["error"].startswith(
        "vllm: error: pipeline_parallel_size: found 2; bpd on model runner V1 serves one stage"
    )


@pytest.mark.parametrize("way", ["too many", "too many offline"])
def test_more_drafts_than_heads_are_refused(replies: dict[str, Any], way: str) -> None:
    """In one line; on the command line it is the exit message, not a traceback."""
    reply = replies[way]
    assert f"num_speculative_tokens: found {NUM_HEADS + 1}" in reply["error"]
    assert f"has {NUM_HEADS} heads" in reply["error"]
    assert "\n" not in reply["error"]
    assert reply.get("exit", False) == (way == "too many")
