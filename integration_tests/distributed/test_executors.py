"""Tensor, pipeline and data parallel, over processes and over Ray: the same ids, the same counters.

Float32, greedily; every engine answers what one process does without speculation, and drafts and
accepts what one process does with the same heads. Model runner V1 has no pipeline stages beside
any speculative method, which is shown as well.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration_tests.distributed.cases import answered
from integration_tests.harness.combos import COMBOS, Combo
from integration_tests.harness.engine_process import REPOSITORY
from integration_tests.harness.heads import write_chain_heads
from integration_tests.harness.jobs import make_prompts
from integration_tests.harness.releases import ReleaseError, find_release
from integration_tests.harness.targets import TARGETS, TEXT_VOCAB, write_target

BASE = Combo("0.32", "V1")
MAX_MODEL_LEN = 96
MAX_TOKENS = 16
LENGTHS = (2, 3, 5, 9, 17, 33, 55)
PROMPTS = make_prompts(LENGTHS, TEXT_VOCAB)
NUM_HEADS, PLACES = 3, 4
# Prompts come in pieces beside requests that decode, and later ones wait.
ENGINE = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "max_num_batched_tokens": 32}
RAY = {"num_cpus": 4, "num_gpus": 4, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
# vLLM's V1 makes the buffer between two stages while it warms up, which it skips on a CPU unless
# something is compiled.
WARM = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


@dataclass(frozen=True)
class Case:
    """How an engine is spread, and where that is tried."""

    name: str
    arguments: dict[str, Any]
    on: tuple[str, ...] = ("0.32-V1", "0.32-V2", "0.33-V1", "0.33-V2")

    @property
    def on_ray(self) -> bool:
        """Whether its workers are Ray's."""
        return self.arguments.get("distributed_executor_backend") == "ray"


def sizes(tensor: int = 1, pipeline: int = 1, backend: str = "mp") -> dict[str, Any]:
    """Arguments of an engine of so many ranks and stages."""
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "distributed_executor_backend": backend,
    }


CASES = (
    Case("tp2", sizes(tensor=2), on=(*Case.on, "0.29-V2")),
    # Ray's LLM libraries pin 0.29, and run it on V1 where there is no GPU.
    Case("tp2-ray", sizes(2, backend="ray"), on=(*Case.on, "0.29-V1")),
    Case("dp2", {"data_parallel_size": 2}, on=("0.32-V1", "0.32-V2", "0.29-V1", "0.29-V2")),
    Case("pp2", sizes(pipeline=2), on=("0.32-V2", "0.33-V2")),  # V1 and 0.29: see below
    Case("pp2-ray", sizes(pipeline=2, backend="ray"), on=("0.32-V2",)),
    Case("tp2-pp2", sizes(2, 2), on=("0.32-V2",)),
)
RUNS = [
    pytest.param(
        combo,
        case,
        id=f"{combo.name}-{case.name}",
        # `make test` runs one of them.
        marks=[] if (combo, case) == (BASE, CASES[0]) else [pytest.mark.distributed],
    )
    for combo in COMBOS
    for case in CASES
    if combo.name in case.on
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 4 attention heads and 2 for keys, and heads as `bpd-train` writes them."""
    root = tmp_path_factory.mktemp("distributed")
    target = write_target(TARGETS["settled"], root / "target")
    write_chain_heads(
        target, root / "lattice", NUM_HEADS, places=PLACES, draft_vocab_size=TEXT_VOCAB - 2
    )
    return root


class Engines:
    """Starts engines over the folder's target, and remembers what one process answered."""

    def __init__(self, folder: Path) -> None:
        """Nothing is started yet."""
        self.folder = folder
        self.known: dict[Combo | None, dict[str, Any]] = {}

    def run(self, combo: Combo, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The reply of one engine."""
        request: dict[str, Any] = {
            "engine": {"model": str(self.folder / "target"), **ENGINE},
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "cases": {name: arguments},
        }
        if arguments.get("distributed_executor_backend") == "ray":
            request["ray"] = RAY
        return answered(combo, self.log(combo, name).parent, request)[name]

    def log(self, combo: Combo, name: str) -> Path:
        """What an engine said while it ran."""
        return self.folder / f"{combo.name}-{name}" / "log"

    def speculating(self) -> dict[str, Any]:
        """The argument that serves the heads."""
        # How sure a draft must be may depend on how many requests run, which is a matter of time.
        config = {"method": "bpd", "model": str(self.folder / "lattice"), "min_confidence": 0.1}
        return {"speculative_config": config}

    def alone(self, combo: Combo | None) -> dict[str, Any]:
        """What one process answers, once a session; None: without speculation, on any."""
        if combo not in self.known:
            if combo is None:  # that all combinations agree is `test_harness.py`'s first test
                self.known[combo] = self.run(BASE, "plain", {})
            else:
                self.known[combo] = self.run(combo, "one", self.speculating())
        return self.known[combo]


@pytest.fixture(scope="session")
def engines(folder: Path) -> Engines:
    """The engines of this session."""
    return Engines(folder)


def need(combo: Combo) -> None:
    """Skip the test where the combination's release cannot be had."""
    try:
        find_release(combo.release)
    except ReleaseError as reason:
        pytest.skip(str(reason))


def test_the_readme_asks_for_what_is_tested() -> None:
    """Every line of its section is the arguments of a case, word for word."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ vllm serve MODEL (.*-parallel-size.*)$", text, flags=re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line)
        options = dict(zip(words[::2], words[1::2], strict=True))
        assert options.pop("--speculative-config") == "bpd"
        asked = {name[2:].replace("-", "_"): value for name, value in options.items()}
        assert any(
            asked
            == {
                name: str(value)
                for name, value in case.arguments.items()
                if value not in (1, "mp")  # as they are by default
            }
            for case in CASES
        ), line


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("combo", "case"), RUNS)
def test_ids_and_counters(engines: Engines, combo: Combo, case: Case) -> None:
    """Those of one process."""
    need(combo)
    plain, one = engines.alone(None), engines.alone(combo)
    assert [len(ids) for ids in plain["ids"]] == [MAX_TOKENS] * len(PROMPTS)
    spread = engines.run(combo, case.name, case.arguments | engines.speculating())
    assert "error" not in spread, spread
    assert (spread["runner"], one["runner"]) == (combo.runner, combo.runner)
    assert spread["executor"] == case.arguments.get("distributed_executor_backend", "mp")
    assert spread["ids"] == one["ids"] == plain["ids"]
    assert spread["spec"] == one["spec"]
    assert 0 < spread["spec"]["drafts"] <= spread["spec"]["drafted"]
    assert spread["spec"]["accepted"] > 0
    assert spread["replicas"] == case.arguments.get("data_parallel_size", 1)
    assert spread["async_scheduling"] or case.arguments.get("pipeline_parallel_size", 1) == 1


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_replicas_of_0_33_want_memory_nodes(engines: Engines) -> None:
    """Its CPU worker looks for one of its own for each replica, without speculation too."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
        pytest.skip("this machine has several memory nodes")
    combo = Combo("0.33", "V1")
    need(combo)
    failed = engines.run(combo, "dp2-plain", {"data_parallel_size": 2})
    assert "Engine core initialization failed" in failed["error"]
    said = engines.log(combo, "dp2-plain").read_text(errors="replace")
    assert re.search(r"allowed_memory_nodes\[0\],\n.*\n.*IndexError: list index", said), said[
        -3000:
    ]


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_stages_on_v1_fail_beside_any_drafter(engines: Engines) -> None:
    """Its first stage lacks the drafter; without speculation two stages answer. So bpd refuses."""
    stages = sizes(pipeline=2) | WARM
    plain = engines.run(BASE, "pp2-plain", stages)
    assert plain["ids"] == engines.alone(None)["ids"]
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    failed = engines.run(BASE, "pp2-ngram", stages | {"speculative_config": ngram})
    assert "Engine core initialization failed" in failed["error"]
    said = engines.log(BASE, "pp2-ngram").read_text(errors="replace")
    assert "'CPUModelRunner' object has no attribute 'drafter'" in said, said[-3000:]
    refused = engines.run(BASE, "pp2", stages | engines.speculating())
    assert refused["error"].startswith("pipeline_parallel_size: found 2; bpd on model runner V1")


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_stages_of_0_29_are_refused(engines: Engines) -> None:
    """Without speculation they answer as one does; beside drafts, wrongly (docs/lab-notes.md)."""
    combo = Combo("0.29", "V2")
    need(combo)
    refused = engines.run(combo, "pp2", sizes(pipeline=2) | engines.speculating())
    assert refused["error"].startswith("pipeline_parallel_size: found 2; bpd serves several stages")
