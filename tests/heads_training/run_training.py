"""One training run, for tests that start it in processes of its own.

`python -m tests.heads_training.run_training FOLDER MODE WORK [STOP]`: `FOLDER` holds the tiny
target and its states; the run is interrupted behind step STOP, where a state has just been saved.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from heads_training.processes import leave
from heads_training.target import read_rows
from heads_training.train import TrainConfig, make_trainer, prepare
from tests.heads_training.made_data import TINY, StopAt

STEPS, HALF = 20, 10


def options(folder: Path, mode: str, ray_workers: int = 0) -> TrainConfig:
    """Twenty steps, a state saved behind ten; heads drawn at random, so that seeds matter."""
    return replace(
        TINY,
        mode=mode,  # type: ignore[arg-type]
        tuned_target=folder / "tuned" if mode == "finetune" else None,
        head_loss="random",
        steps=STEPS,
        validate_every=HALF,
        ray_workers=ray_workers,
    )


def main(folder: str, mode: str, work: str, stop: str = "0") -> None:
    """Train from what `work` holds."""
    _run(Path(folder), mode, Path(work), int(stop))
    leave()
    # A thread of the group that outlives it may abort the process when Python ends.
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert not [name for name in threads if "gloo" in name], threads
    # Neither an engine nor Ray is needed to train.
    assert not {"vllm", "ray"} & sys.modules.keys()


def _run(folder: Path, mode: str, work: Path, stop: int) -> None:
    config = options(folder, mode)
    shards = sorted((folder / "states").glob("*.safetensors"))
    data = prepare(config, shards, read_rows(str(folder / "target")))
    trainer = make_trainer(config, data, work)
    trainer.add_callback(StopAt(stop))
    trainer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
