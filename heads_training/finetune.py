"""Finetune mode: the target under training, and the new target that comes out.

The new target is a plain Hugging Face checkpoint. What it says is its own: text served from it is
no longer the old target's, and heads made with it belong to it alone.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from heads_training.loop import HeadsTrainer
from heads_training.objectives import TunedObjective
from heads_training.packing import require_packable
from heads_training.placement import one_device
from heads_training.target import TargetRows, load_model, read_rows
from heads_training.train import TrainingData
from heads_training.train_config import TrainConfig
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import BlockwiseHeads

logger = logging.getLogger(__name__)

MARK_FILE = "bpd-finetuned.json"  # says that a folder is ours, and may be replaced by a later run
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".md"}


def make_objective(
    config: TrainConfig, data: TrainingData, heads: BlockwiseHeads
) -> TunedObjective:
    """The target's weights in float32, all trainable, with `heads`. Errors as `load_model`."""
    if data.target.folder is None:
        raise HeadsError("target: found no folder; finetune starts from a checkpoint's weights")
    # Whole on this process's device, however large: DDP and FSDP share it out themselves.
    base = load_model(str(data.target.folder), torch.float32, one_device())
    if config.packing:
        require_packable(base)
    base.requires_grad_(True)
    if config.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return TunedObjective(base, heads, data.draft_ids_V, config.logits_chunk)


def require_replaceable(folder: Path) -> None:
    """Raise HeadsError unless `folder` can receive the new target.

    It can when absent, empty, or made by this mode.
    """
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not empty and not (folder / MARK_FILE).is_file():
        raise HeadsError(
            f"tuned_target: {folder}: found something other than a target of an earlier finetune; "
            "expected an empty or new folder: name another one, or remove it"
        )


def write_target(
    trainer: HeadsTrainer, data: TrainingData, heads: BlockwiseHeads, folder: Path
) -> tuple[BlockwiseHeads, TargetRows]:
    """Write the new target, whole or not at all; return `heads` bound to it, and its rows.

    Weights have the old checkpoint's dtype; tokenizer, generation and chat files are copied from
    it, its README and any heads inside it are not.
    """
    weights = trainer.whole_weights("base.")
    if trainer.args.should_save:
        _write(trainer, weights, data, folder)
    trainer.accelerator.wait_for_everyone()
    target = read_rows(str(folder))
    if target.fingerprint == data.target.fingerprint:
        logger.warning(
            "%s: the LM-head rows that a target is told by are those of the old one, so neither "
            "target will refuse the other's heads; train longer, or with a higher "
            "--base-learning-rate",
            folder,
        )
    bound = BlockwiseHeads(replace(heads.config, target=target.fingerprint))
    bound.load_state_dict(heads.state_dict())
    return bound, target


def _write(
    trainer: HeadsTrainer, weights: dict[str, torch.Tensor], data: TrainingData, folder: Path
) -> None:
    source = data.target.folder
    assert source is not None
    dtype = data.target.lm_head_VD.dtype
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    staging = private / folder.name
    try:
        model = load_model(str(source), dtype, one_device())
        model.load_state_dict({n: t.to(dtype) for n, t in weights.items()}, strict=False)
        model.tie_weights()
        model.save_pretrained(staging)
        for path in source.iterdir():
            wanted = path.is_file() and path.suffix not in _NOT_COPIED
            if (
                wanted
                and not path.name.endswith(".index.json")
                and not (staging / path.name).exists()
            ):
                shutil.copyfile(path, staging / path.name)
        mark = {"finetuned_from": source.name, "steps": trainer.config.steps}
        (staging / MARK_FILE).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
        (staging / "README.md").write_text(_readme(source.name), encoding="utf-8")
        if folder.exists():
            folder.rename(private / "old")
        staging.rename(folder)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _readme(source: str) -> str:
    return (
        f"# {source}, fine-tuned with blockwise heads\n\n"
        "All weights were trained together with blockwise heads (Stern et al. 2018, section 6.2). "
        f"This is another model than {source}: its outputs are its own, with heads or without. "
        f"Heads made with it do not fit {source}, nor the other way round.\n"
    )
