"""A checkpoint from what is there: the newest training state, or heads in another dtype."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint

from heads_training.hidden_states import write_states
from heads_training.pipeline import fit_lattice
from heads_training.provenance import PROVENANCE_FILE, versions
from heads_training.recipe import Recipe
from heads_training.target import read_rows, resolve_target
from heads_training.train import TrainConfig, TrainingData, made_with, new_heads, prepare
from heads_training.training_state import heads_weights, read_state
from vllm_bpd.checkpoint import load_heads, load_lattice, require_replaceable, save_heads
from vllm_bpd.errors import HeadsError
from vllm_bpd.fingerprint import explain_mismatch, read_fingerprint
from vllm_bpd.heads import BlockwiseHeads


def export_checkpoint(recipe: Recipe, command: str) -> str:
    """Write `recipe.output` without training; what it was made from, in words.

    From `recipe.export.heads`, whose provenance goes along, or from the newest state in
    `recipe.work`, trained to the end or not. Raises HeadsError, with nothing written, for heads
    of another target, or a state that is missing or was made with other options.
    """
    require_replaceable(recipe.output)
    dtype: torch.dtype = getattr(torch, recipe.export.dtype)
    if recipe.export.heads is not None:
        heads, ids_V = _stored(recipe.export.heads, recipe.target)
        files, lattice_PW = _provenance(recipe.export.heads), load_lattice(recipe.export.heads)
        save_heads(recipe.output, heads, ids_V, dtype, files, lattice_PW)
        return str(recipe.export.heads)
    states, prompts = recipe.work / "states", recipe.train.reads_prompts
    shards = write_states(recipe.target, recipe.answers_path, states, prompts)
    # Soft labels take a pass over all states, and decide nothing here.
    data = prepare(replace(recipe.train, distillation=0.0), shards, read_rows(recipe.target))
    heads, state = _newest(recipe.train, data, recipe.work)
    made = {
        "command": command,
        "training_state": state.name,
        "recipe": recipe.describe(),
        "versions": versions(),
    }
    files = {PROVENANCE_FILE: json.dumps(made, indent=2) + "\n"}
    save_heads(recipe.output, heads, data.draft_ids_V, dtype, files)
    lattice_PW = fit_lattice(recipe, data.target, data.texts)
    save_heads(recipe.output, heads, data.draft_ids_V, dtype, files, lattice_PW)
    return str(state)


def _stored(folder: Path, target: str) -> tuple[BlockwiseHeads, Tensor | None]:
    """Heads of `target` in `folder`, and their draft vocabulary."""
    heads, ids_V = load_heads(folder)
    mismatch = explain_mismatch(heads.config.target, read_fingerprint(resolve_target(target)))
    if mismatch:
        raise HeadsError(f"{folder}: {mismatch}")
    return heads, ids_V


def _provenance(folder: Path) -> dict[str, str]:
    """Name and text of the provenance in `folder`, if there is one."""
    path = folder / PROVENANCE_FILE
    return {path.name: path.read_text(encoding="utf-8")} if path.is_file() else {}


def _newest(config: TrainConfig, data: TrainingData, work: Path) -> tuple[BlockwiseHeads, Path]:
    """Heads of the newest state in `work`, and its folder."""
    if config.mode == "finetune":
        raise HeadsError(
            "mode: found finetune; expected frozen: heads fit a new target, which is written when "
            "training ends"
        )
    last = get_last_checkpoint(str(work))
    if last is None:
        raise HeadsError(
            f"work: {work}: found no training state; expected one of `bpd-train train`, which "
            f"saves it every {config.validate_every} steps (validate_every)"
        )
    tensors, _ = read_state(Path(last), made_with(config, data))
    heads = new_heads(config, data)
    heads.load_state_dict(heads_weights(tensors))
    return heads, Path(last)
