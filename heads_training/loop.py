"""The training loop: `transformers.Trainer`, with batches, state and checks of our own.

What Trainer and accelerate give: the loop, schedule, mixed precision, DDP and FSDP, progress bars,
TensorBoard. What is replaced, and why:

- Batches follow from seed and step (`heads_training.batches`), not from a sampler's state.
- State is safetensors and JSON, never a pickle (`heads_training.training_state`).
- Every step seeds the random generators with its number, so no generator's state is kept.
- A loss or gradient that is not finite stops the run; Trainer would go on and log an average.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from heads_training import training_state
from heads_training.batches import Steps
from heads_training.objectives import FrozenObjective, TunedObjective
from heads_training.train_config import TrainConfig
from vllm_bpd.errors import HeadsError

LOG_FILE = "train-log.jsonl"
_TRAINER_STATE_FILE = "trainer_state.json"  # the name under which Trainer reads it
_SEED_STRIDE = 1_000_003


def arguments(config: TrainConfig, work: Path) -> TrainingArguments:
    """Trainer's own options for this run. Logging, validation and saving follow `_Schedule`."""
    return TrainingArguments(
        output_dir=str(work),
        max_steps=config.steps,
        per_device_train_batch_size=1,  # an item of `Steps` is a batch
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=int(config.warmup * config.steps),
        max_grad_norm=config.grad_clip,
        bf16=config.autocast,
        use_cpu=not torch.cuda.is_available(),
        seed=config.seed,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would hide what has to stop the run
        report_to=["tensorboard"] if find_spec("tensorboard") else [],
        remove_unused_columns=False,
        # One loss drawn of several leaves the others' weights without a gradient.
        ddp_find_unused_parameters=config.mode == "finetune" and config.head_loss == "random",
    )


class _Schedule(TrainerCallback):
    """Logs, validates and saves every `validate_every` steps and at the end."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: Any,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        step = state.global_step
        if step % self.config.validate_every == 0 or step == self.config.steps:
            control.should_log = control.should_evaluate = control.should_save = True


class HeadsTrainer(Trainer):
    """One training run of an objective over `Steps`."""

    def __init__(
        self,
        config: TrainConfig,
        objective: FrozenObjective | TunedObjective,
        make_steps: Callable[[int, int], Steps],
        validate: Callable[[HeadsTrainer], float],
        made_with: dict[str, Any],
        work: Path,
    ) -> None:
        """`make_steps(rank, world)` makes this process's batches; `validate` gives k-hat.

        `made_with` is plain data that a saved state must share. Every process calls everything.
        """
        super().__init__(
            model=objective, args=arguments(config, work), callbacks=[_Schedule(config)]
        )
        self.config, self.validate, self.made_with, self.work = config, validate, made_with, work
        self.loss_is_scaled_for_ga = True  # `Steps` divides by the whole step's labels
        self.steps = make_steps(self.args.process_index, self.args.world_size)
        self.objective: FrozenObjective | TunedObjective = objective
        self.k_hat = 1.0
        self._begin, self._spent = time.monotonic(), 0.0
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """What training has taken, up to the state that this run began with included."""
        return self._spent + time.monotonic() - self._begin

    def run(self) -> None:
        """Train to the end, from the state in `work` if there is one.

        Raises HeadsError for a state that does not fit, or a loss that is not finite.
        """
        last = get_last_checkpoint(str(self.work))
        self._begin = time.monotonic()
        if last is not None and int(last.rsplit("-", 1)[1]) >= self.config.steps:
            self._load_from_checkpoint(last)
            self.state.global_step = self.config.steps
            # For its autocast, under which the run was validated.
            self.model_wrapped = self.accelerator.prepare_model(
                self.objective, evaluation_mode=True
            )
            self.k_hat = self.validate(self)
            return
        self.train(resume_from_checkpoint=last)

    def whole_weights(self, prefix: str) -> dict[str, Tensor]:
        """The weights below `prefix`, whole, by their names behind it. Every process calls it."""
        weights = training_state.whole_weights(self.model_wrapped)
        return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """This process's batches in the order of steps; accelerate has nothing left to shard."""
        return DataLoader(
            self.steps,
            batch_size=1,
            sampler=SequentialSampler(self.steps),
            collate_fn=_only,
            pin_memory=torch.cuda.is_available(),
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW; the target's own weights have their own rate, vectors no weight decay."""
        config = self.config
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in (model or self.objective).named_parameters():
            is_base, decays = "base." in name, parameter.ndim > 1
            groups.setdefault((is_base, decays), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "lr": config.base_learning_rate if is_base else config.learning_rate,
                    "weight_decay": config.weight_decay if decays else 0.0,
                }
                for (is_base, decays), parameters in groups.items()
            ],
            fused=True,
        )
        return self.optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """As Trainer's, seeded by the step: dropout, if the target has any, is the same again."""
        torch.manual_seed(self.config.seed * _SEED_STRIDE + self.state.global_step)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not math.isfinite(float(loss)):
            self._refuse("loss", float(loss))
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm: Tensor = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if not math.isfinite(float(norm)):  # the same in every process, so all of them stop
            self._refuse("gradient norm", float(norm))
        return norm

    def _refuse(self, name: str, value: float) -> None:
        step = self.state.global_step
        raise HeadsError(
            f"training: {name}: found {value} at step {step}, on {self.steps.describe(step)}; "
            "expected a finite one; lower --learning-rate, or look for damaged states"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, but for its epoch: to Trainer the whole run is one."""
        self.state.epoch = None  # type: ignore[assignment]
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # noqa: ARG002
        """k-hat of the walk on held-out answers, into every log."""
        self.k_hat = self.validate(self)
        entry = {
            "step": self.state.global_step,
            "loss": round(self.state.log_history[-1]["loss"], 4),
            "validation_k_hat": round(self.k_hat, 4),
            "skipped_batches": self.steps.order.skipped(self.state.global_step),
            "seconds": round(self.seconds, 1),
        }
        self.log({"validation_k_hat": self.k_hat})
        if self.args.should_save:
            with (self.work / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
        metrics = {"eval_k_hat": self.k_hat}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ARG002
        """Write the whole state or nothing; then remove older ones."""
        tensors = training_state.gather_state(model, self._plain_optimizer())
        if not self.args.should_save:
            return
        folder = self.work / f"checkpoint-{self.state.global_step}"
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        assert self.lr_scheduler is not None
        values = {"schedule": self.lr_scheduler.state_dict(), "seconds": self.seconds}
        training_state.save_state(partial, tensors, values, self.made_with)
        self.state.save_to_json(str(partial / _TRAINER_STATE_FILE))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        for older in self.work.glob("checkpoint-*"):
            if older != folder:
                shutil.rmtree(older)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self._tensors, self._values = training_state.read_state(
            Path(resume_from_checkpoint), self.made_with
        )
        self._spent = self._values["seconds"]
        training_state.load_weights(model or self.objective, self._tensors)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = self._plain_optimizer()
        assert self.lr_scheduler is not None
        training_state.load_moments(self.model_wrapped, optimizer, self._tensors)
        self.lr_scheduler.load_state_dict(self._values["schedule"])
        for group, rate in zip(
            optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        self._tensors = {}

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Without what accelerate wraps around it."""
        optimizer: Any = self.optimizer
        plain: torch.optim.Optimizer = optimizer.optimizer
        return plain

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing to restore: `training_step` seeds every step."""


def _only(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return batches[0]
