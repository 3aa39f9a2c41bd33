"""What may be chosen about training, as one documented record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from vllm_bpd.config import Activation, Conditioning
from vllm_bpd.errors import HeadsError

Mode = Literal["frozen", "finetune"]
States = Literal["cached", "online"]
HeadLoss = Literal["random", "mean", "weighted"]


@dataclass(frozen=True)
class TrainConfig:
    """How heads are shaped and trained.

    The paper (arXiv 1811.03115, section 6) trains three ways: the base frozen (`mode` frozen);
    base and heads together (`finetune`); either of them on answers of a teacher instead of
    references (distillation), which is a matter of whose answers the data holds.
    """

    mode: Annotated[Mode, "frozen: heads only; finetune: the target, too, writing a new one"] = (
        "frozen"
    )
    num_draft_heads: Annotated[int, "extra heads, k - 1"] = 4
    head_hidden_size: Annotated[int, "hidden units for each head; the joint layer has all"] = 560
    activation: Annotated[Activation, "between the two layers"] = "silu"
    conditioning: Annotated[Conditioning, "what heads read beside the state"] = "sampled_token"
    draft_vocab_size: Annotated[int, "ids that heads score; 0: the whole vocabulary"] = 8192
    lattice_places: Annotated[
        int, "most drafts a step where the request's own text helps the heads; 0: heads alone"
    ] = 8
    states: Annotated[
        States, "cached: hidden states in WORK/states; online: made in this run, held in memory"
    ] = "cached"
    prompt_rows: Annotated[
        bool, "frozen: train on the prompts' tokens as well, which the target reads anyway"
    ] = True
    head_loss: Annotated[
        HeadLoss, "random: one of the losses drawn each step, as in the paper; mean; weighted"
    ] = "weighted"
    head_decay: Annotated[float, "weighted: a loss's share, relative to the head before, 0..1"] = (
        0.7
    )
    distillation: Annotated[float, "share of the target's probabilities in the labels, 0..1"] = 0.5
    steps: Annotated[int, "optimiser steps"] = 4000
    batch_size: Annotated[int, "frozen: rows (tokens) a step, of all processes"] = 1024
    batch_texts: Annotated[int, "finetune: answers a step, of all processes"] = 16
    max_tokens: Annotated[int, "finetune: prompt and answer are cut behind so many tokens"] = 4096
    packing: Annotated[bool, "finetune: several answers in a row of max_tokens, not padded"] = True
    gradient_accumulation: Annotated[int, "parts that a step's batch is run in, one by one"] = 1
    gradient_checkpointing: Annotated[bool, "finetune: recompute layers, to save memory"] = False
    logits_chunk: Annotated[int, "rows whose logits are held at once; bounds memory"] = 256
    learning_rate: Annotated[float, "heads: peak of the cosine schedule"] = 2e-3
    base_learning_rate: Annotated[float, "finetune: peak for the target's own weights"] = 2e-5
    warmup: Annotated[float, "share of the steps with a rising learning rate, 0..1"] = 0.05
    weight_decay: Annotated[float, "AdamW's, of matrices"] = 0.01
    grad_clip: Annotated[float, "largest gradient norm"] = 1.0
    validation: Annotated[float, "share of the prompts held out, 0..1"] = 0.05
    validation_rows: Annotated[int, "rows at most, whole answers, for checks on the way"] = 16384
    validate_every: Annotated[int, "steps between validations; the state is saved then too"] = 500
    seed: Annotated[int, "draws weights, batches and heads"] = 0
    autocast: Annotated[bool, "matrix products in bf16; otherwise float32"] = True
    tuned_target: Annotated[Path | None, "finetune: folder that receives the new target"] = None
    ray_workers: Annotated[int, "workers of Ray Train; 0: this process, or torchrun's"] = 0

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises HeadsError naming field, found and expected."""
        at_least_one = (
            "steps", "batch_size", "batch_texts", "max_tokens", "gradient_accumulation",
            "logits_chunk", "validate_every", "validation_rows",
        )  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected at least 1")
        for name, allowed in (("mode", Mode), ("states", States), ("head_loss", HeadLoss)):
            if getattr(self, name) not in get_args(allowed):
                expected = " or ".join(get_args(allowed))
                raise HeadsError(f"{name}: found {getattr(self, name)!r}; expected {expected}")
        self._check_numbers()
        self._check_together()

    def _check_together(self) -> None:
        if self.states == "online" and self.ray_workers:
            raise HeadsError(
                f"ray_workers: found {self.ray_workers} with states online; expected cached ones, "
                "which workers read from disk"
            )
        if (self.mode == "finetune") != (self.tuned_target is not None):
            raise HeadsError(
                f"tuned_target: found {self.tuned_target}; expected a folder with mode finetune, "
                f"which writes a new target, and only then; mode is {self.mode}"
            )

    def _check_numbers(self) -> None:
        for name in ("head_decay", "distillation", "warmup", "validation"):
            if not 0 <= getattr(self, name) <= 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected 0 to 1")
        for name in ("learning_rate", "base_learning_rate", "grad_clip"):
            if not getattr(self, name) > 0:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected more than 0")
        for name in ("draft_vocab_size", "lattice_places", "weight_decay", "ray_workers"):
            if getattr(self, name) < 0:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected at least 0")

    @property
    def reads_prompts(self) -> bool:
        """Whether rows under prompts are trained on."""
        return self.prompt_rows and self.mode == "frozen"

    def made_with(self) -> dict[str, Any]:
        """The fields that a training state must share with the run that goes on from it."""
        values = asdict(self)
        del values["tuned_target"], values["ray_workers"], values["states"]  # where, not what
        del values["lattice_places"]  # fitted when the heads are done
        return values
