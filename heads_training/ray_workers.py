"""Training in workers of Ray Train: the same `prepare` and `train`, in each of N workers.

The one module that knows of Ray, imported only when workers are asked for. Workers read shards and
target and write the training state, so on several machines the target, the answers' states and
the work folder have to lie on storage that all of them see, under the same paths.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads_training.target import read_rows
from heads_training.train import make_trainer, prepare
from heads_training.train_config import TrainConfig
from vllm_bpd.errors import HeadsError

logger = logging.getLogger(__name__)

# Bytes. Nothing but options goes through Ray's object store; the data is read from files.
_OBJECT_STORE = 100 * 2**20


def train_on_ray(config: TrainConfig, shards: list[Path], target: str, work: Path) -> None:
    """Run the steps in `config.ray_workers` workers; the finished state is in `work`.

    `heads_training.train.train` in the calling process then takes it up, as from any finished run.
    Uses a Ray that is running (`RAY_ADDRESS`), or one of its own on this machine. Raises HeadsError
    as `train` does, or if Ray is not installed or has too few machines.
    """
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise HeadsError(
            f"ray_workers: found {config.ray_workers}, but Ray Train cannot be imported ({error}); "
            "install it: pip install 'vllm-bpd[ray]'"
        ) from None
    arguments = {
        "config": config,
        "shards": [path.resolve() for path in shards],
        "target": str(Path(target).resolve()) if Path(target).exists() else target,
        "work": work.resolve(),
    }
    with _running(config.ray_workers):
        # The cluster's, not this process's: a head node often has no GPU.
        on_gpus = use_gpus(ray.cluster_resources(), config.ray_workers)
        logger.info("%d workers of Ray on %s", config.ray_workers, "GPUs" if on_gpus else "CPUs")
        trainer = TorchTrainer(
            _work,
            train_loop_config=arguments,
            scaling_config=ScalingConfig(num_workers=config.ray_workers, use_gpu=on_gpus),
            run_config=RunConfig(name="ray", storage_path=str(work.resolve())),
        )
        try:
            trainer.fit()
        except Exception as error:
            refused = _refusal(error)
            if refused is None:
                raise
            raise HeadsError(refused) from None


def use_gpus(resources: Mapping[str, float], workers: int) -> bool:
    """Whether each worker gets a GPU of a cluster with these resources; False: it has none.

    Raises HeadsError if it has some, but too few: on CPUs that would take days unnoticed.
    """
    gpus = resources.get("GPU", 0)
    if 0 < gpus < workers:
        raise HeadsError(
            f"ray_workers: found {workers} on a cluster with {gpus:g} GPUs; expected no more "
            "workers than GPUs: give fewer, or wait for the other nodes"
        )
    return gpus >= workers


def _work(arguments: dict[str, Any]) -> None:
    """What each worker runs; Ray has joined them in a process group already."""
    config = arguments["config"]
    data = prepare(config, arguments["shards"], read_rows(arguments["target"]))
    make_trainer(config, data, arguments["work"]).run()


@contextmanager
def _running(workers: int) -> Iterator[None]:
    """A Ray that is there, or one on this machine alone, which ends with the block."""
    import ray

    if ray.is_initialized():
        yield
        return
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(
            address="local",
            num_cpus=max(workers, os.cpu_count() or 1),
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )
    try:
        yield
    finally:
        ray.shutdown()


def _refusal(error: BaseException | None) -> str | None:
    """The message of the HeadsError that a worker failed with, if it was one."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in [*failures.values(), getattr(error, "__cause__", None)]:
        if isinstance(failure, HeadsError):
            return str(failure)
        if failure is not None and (found := _refusal(failure)) is not None:
            return found
    cause = getattr(error, "cause", None)  # of Ray's own wrapping
    return str(cause) if isinstance(cause, HeadsError) else None
