"""Runs in one process, in two of torchrun's and in two of Ray's: exact resume, the same curve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads_training.hidden_states import write_states
from heads_training.target import read_rows
from heads_training.train import prepare, train
from heads_training.training_state import STATE_FILE
from tests.heads_training.run_training import HALF, STEPS, options

# Ray leaves its processes' pipes open, and uses what it has itself deprecated.
rays_own_warnings = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning"
)
_TIMEOUT = 240  # seconds for one run's processes to start, train and end


@pytest.fixture(scope="module")
def folder(tiny_target: Path, tiny_answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs read: the tiny target and its states."""
    made = tmp_path_factory.mktemp("runs")
    (made / "target").symlink_to(tiny_target)
    write_states(str(made / "target"), tiny_answers, made / "states")
    return made


def run(folder: Path, mode: str, work: Path, processes: int, stop: int = 0) -> None:
    """One run in processes of its own: plainly in one, by torchrun in more."""
    words = [sys.executable, "-m"]
    if processes > 1:
        words += ["torch.distributed.run", f"--nproc-per-node={processes}"]
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--module"]
    words += ["tests.heads_training.run_training", str(folder), mode, str(work), str(stop)]
    done = subprocess.run(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
    )
    assert done.returncode == 0, done.stderr


def state(work: Path, step: int = STEPS) -> dict[str, Tensor]:
    return load_file(work / f"checkpoint-{step}" / STATE_FILE)


def curve(work: Path) -> list[tuple[float, float]]:
    """Loss and k-hat at each check."""
    lines = [json.loads(line) for line in (work / "train-log.jsonl").read_text().splitlines()]
    return [(line["loss"], line["validation_k_hat"]) for line in lines]


def losses(work: Path) -> list[float]:
    """As Trainer logged them, unrounded."""
    path = work / f"checkpoint-{STEPS}" / "trainer_state.json"
    history = json.loads(path.read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A frozen run of two processes, never interrupted."""
    run(folder, "frozen", folder / "whole", 2)
    return folder / "whole"


@pytest.mark.slow
def test_finetune_in_two_processes_goes_on_exactly(folder: Path, tmp_path: Path) -> None:
    """Ten and ten steps are twenty. In one process: test_train.py."""
    run(folder, "finetune", tmp_path / "whole", 2)
    run(folder, "finetune", tmp_path / "parts", 2, stop=HALF)
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint-*")] == ["checkpoint-10"]
    run(folder, "finetune", tmp_path / "parts", 2)
    assert_equal(state(tmp_path / "parts"), state(tmp_path / "whole"))
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_go_on_exactly_and_train_as_one(
    whole: Path, folder: Path, tmp_path: Path
) -> None:
    run(folder, "frozen", tmp_path / "parts", 2, stop=HALF)
    run(folder, "frozen", tmp_path / "parts", 2)
    assert_equal(state(tmp_path / "parts"), state(whole))
    run(folder, "frozen", tmp_path / "one", 1)
    assert losses(tmp_path / "one") == pytest.approx(losses(whole), rel=1e-5)
    assert curve(tmp_path / "one")[-1][1] == curve(whole)[-1][1]


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """A Ray on this machine alone, gone with the module."""
    ray = pytest.importorskip("ray", reason="Ray is an extra of its own")
    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


@pytest.mark.slow
@rays_own_warnings
def test_rays_workers_train_as_torchruns(
    one_ray: None, whole: Path, folder: Path, tmp_path: Path
) -> None:
    """Both are two processes over gloo, and equal to the last bit."""
    from heads_training.ray_workers import train_on_ray

    config = options(folder, "frozen", ray_workers=2)
    shards = sorted((folder / "states").glob("*.safetensors"))
    train_on_ray(config, shards, str(folder / "target"), tmp_path)
    assert losses(tmp_path) == losses(whole)
    assert_equal(state(tmp_path), state(whole))
    # The caller takes up what the workers have finished.
    trained = train(config, prepare(config, shards, read_rows(str(folder / "target"))), tmp_path)
    assert round(trained.validation_k_hat, 4) == curve(whole)[-1][1]
    expected = state(tmp_path)["model.heads.output_layer.weight"]
    assert torch.equal(trained.heads.output_layer.weight, expected)  # type: ignore[arg-type]


@pytest.mark.slow
@rays_own_warnings
def test_a_workers_refusal_is_one_line(one_ray: None, folder: Path, tmp_path: Path) -> None:
    from heads_training.ray_workers import train_on_ray
    from vllm_bpd.errors import HeadsError

    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / STATE_FILE).write_bytes(b"cut off")
    shards = sorted((folder / "states").glob("*.safetensors"))
    with pytest.raises(HeadsError, match=r"checkpoint-5/state.safetensors: not a training state"):
        train_on_ray(options(folder, "frozen", 2), shards, str(folder / "target"), tmp_path)
