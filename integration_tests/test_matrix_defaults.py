"""Row batching: what a user gets who sets no option, at any number of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import greedy, make_job, make_prompts, run, token_ids
from integration_tests.harness.matrix import LATTICE
from integration_tests.harness.targets import Target, write_target
from vllm_bpd.confidence import ON_CPU

VOCAB = 12  # so few that random heads are sure at times, and texts soon go round in circles
NUM_HEADS, PLACES = 2, 5
MOST = 16
STEP = 160  # tokens: a prompt each, so that one request after another joins
# The first one runs alone at the beginning, and the last two do at the end.
LONGEST = 150
MAX_TOKENS = [LONGEST, LONGEST - 30] + [50 + 3 * row for row in range(MOST - 2)]
ENGINE = {"max_model_len": 320, "max_num_seqs": MOST, "max_num_batched_tokens": STEP}


def trust_texts(heads: Path) -> None:
    """Let the lattice be as sure of long matches as a fitted one, so that texts alone draft, too.

    Where many run a draft has to be surer than any is with the weights that fitting starts from.
    """
    from safetensors.torch import load_file, save_file

    from vllm_bpd.lattice import FLOOR

    path = heads / "model.safetensors"
    tensors = load_file(path)
    tensors["lattice_weights"][:, FLOOR] += 3
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.row("batching")
@pytest.mark.parametrize("mode", [LATTICE])
def test_from_one_request_to_many_and_back(
    engine: EngineProcess, tmp_path: Path, mode: str
) -> None:
    """A lattice and no options: on a CPU the heads rest where many run (V1), and come back."""
    target = write_target(
        Target("in-circles", "Llama", VOCAB, tied=False, settled=True), tmp_path / "target"
    )
    heads = write_heads(target, tmp_path / "heads", NUM_HEADS, places=PLACES)
    trust_texts(heads)
    batch = greedy(make_prompts([STEP] * MOST, VOCAB), 0, mode)
    batch["sampling"] = [batch["sampling"] | {"max_tokens": tokens} for tokens in MAX_TOKENS]
    alone = run(engine, make_job(target, [batch | {"drafts": "heads"}], **ENGINE))["batches"][0]
    config = {"method": "bpd", "model": str(heads)}
    found = run(engine, make_job(target, [batch], speculative_config=config, **ENGINE))
    found = found["batches"][0]
    assert token_ids(found) == token_ids(alone)
    assert found["faults"] == []
    assert 0 < found["spec"]["accepted"] <= found["spec"]["drafted"]
    seen, running = found["lattice"], [requests for requests, _ in found["lattice"]["steps"]]
    assert ON_CPU.heads_up_to is not None
    assert running[0] == running[-1] == 1
    assert max(running) > ON_CPU.heads_up_to + 1
    assert seen["moved"] > 0
    assert seen["by_heads"] > 0
    if engine.combo.runner == "V1":
        assert seen["by_text_alone"] > 0
