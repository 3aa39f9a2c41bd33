"""The stages of a recipe: answers, hidden states, training, held-out figures, provenance."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads_training.dataset import Texts, describe, read_texts, split_held_out
from heads_training.evaluate import evaluate, evaluate_rows, write_json
from heads_training.generate import GenerateConfig, generate
from heads_training.hidden_states import Shard, iterate_states, write_states
from heads_training.lattice_fit import fit_weights, make_lattice
from heads_training.lock import only_one
from heads_training.plot import check_plot_path, write_plot
from heads_training.processes import leave, main_first, processes
from heads_training.provenance import PROVENANCE_FILE, provenance
from heads_training.recipe import Recipe
from heads_training.target import TargetRows, read_rows, resolve_target
from heads_training.train import Trained, TrainingData, prepare, train
from vllm_bpd.checkpoint import load_heads, require_replaceable, save_heads
from vllm_bpd.errors import HeadsError, read_json

logger = logging.getLogger(__name__)


def generate_answers(recipe: Recipe) -> int:
    """Write the answers that are not there yet; answer tokens written."""
    return generate(_within_context(recipe.generate))


def _within_context(config: GenerateConfig) -> GenerateConfig:
    """With the default `max_model_len` cut to the target's context; one that was chosen stays.

    Raises HeadsError if that leaves an answer no room.
    """
    path = resolve_target(config.target) / "config.json"
    values = read_json(path, "a model's config")
    context = (values.get("text_config") or values).get("max_position_embeddings")
    default = GenerateConfig.max_model_len
    if not isinstance(context, int) or not context < config.max_model_len == default:
        return config
    logger.info("max_model_len: %d, all that the target's context has", context)
    return replace(config, max_model_len=context)


def train_checkpoint(recipe: Recipe, command: str) -> dict[str, Any] | None:
    """Train heads on the recipe's answers; write them, with provenance, to `recipe.output`.

    `recipe.work` keeps hidden states, training state and log, so that the same call goes on after
    an interruption. `command` goes into the provenance. Returns the walk's report on the held-out
    answers, which is also written as JSON and drawn; None in all but the first of torchrun's
    processes. Raises HeadsError for bad input, or if another process trains in `recipe.work`.
    """
    # Now, not after hours of training.
    require_replaceable(recipe.output)
    _check_outputs(recipe)
    if not processes().is_main_process:
        return _train(recipe, command)
    with only_one(recipe.work):
        return _train(recipe, command)


def _train(recipe: Recipe, command: str) -> dict[str, Any] | None:
    shards = _shards(recipe)
    data = prepare(recipe.train, shards, read_rows(recipe.target))
    counts = describe(data.texts)
    logger.info(
        "%d answers, %d answer tokens, %d loops; draft vocabulary covers %.4f of held-out tokens",
        counts["records"],
        counts["answer_tokens"],
        counts["loops"],
        data.coverage,
    )
    if recipe.train.ray_workers:
        from heads_training.ray_workers import train_on_ray

        paths = [shard for shard in shards if isinstance(shard, Path)]
        train_on_ray(recipe.train, paths, recipe.target, recipe.work)  # `train` takes it up
    trained = train(recipe.train, data, recipe.work)
    leave()
    if not processes().is_main_process:
        return None
    # Written first, so that a failing evaluation loses nothing; then evaluated as stored.
    save_heads(recipe.output, trained.heads, data.draft_ids_V)
    texts = _own_texts(recipe, data, trained)
    weights_PW = fit_lattice(recipe, trained.target, texts)
    save_heads(recipe.output, trained.heads, data.draft_ids_V, lattice_weights_PW=weights_PW)
    report_T = split_held_out(texts, recipe.train.validation)[1]
    report = evaluate_rows(recipe.output, trained.target, texts, report_T)
    save_heads(
        recipe.output,
        trained.heads,
        data.draft_ids_V,
        extra_files={PROVENANCE_FILE: provenance(command, recipe, data, trained, report)},
        lattice_weights_PW=weights_PW,
    )
    return _write_report(recipe, report)


def fit_lattice(recipe: Recipe, target: TargetRows, texts: Texts) -> Tensor | None:
    """Weights of the lattice, float32 [P, W], for the heads of `target` in `recipe.output`.

    Fitted to held-out answers of `texts`, on which no figures are reported. None if the recipe
    wants none.
    """
    if not recipe.train.lattice_places:
        return None
    rows_T = split_held_out(texts, recipe.train.validation)[0]
    places = max(recipe.train.lattice_places, recipe.train.num_draft_heads)
    heads, draft_ids_V = load_heads(recipe.output, torch.bfloat16)
    return fit_weights(make_lattice(heads, texts, rows_T, target, draft_ids_V, places), places)


def _shards(recipe: Recipe) -> list[Path] | list[Shard]:
    """Hidden states of the answers: on disk, made where needed, or in memory alone."""
    target, answers, prompts = recipe.target, recipe.answers_path, recipe.train.reads_prompts
    if recipe.train.states == "online":
        return list(iterate_states(target, answers, prompts))
    with main_first():
        return write_states(target, answers, recipe.work / "states", prompts)


def _own_texts(recipe: Recipe, data: TrainingData, trained: Trained) -> Texts:
    """The answers with the states of the target that the heads are of."""
    if recipe.train.mode == "frozen":
        return data.texts
    logger.warning(
        "%s: a new target; text served from it is no longer %s's. The figures below are on answers "
        "recorded before; generate new ones with it for what it will really accept",
        recipe.train.tuned_target,
        recipe.target,
    )
    states = recipe.work / "tuned-states"
    shards = write_states(str(trained.target.folder), recipe.answers_path, states)
    return read_texts(shards, recipe.train.num_draft_heads)


def evaluate_checkpoint(recipe: Recipe) -> dict[str, Any]:
    """The report on heads that are there, written as JSON and drawn. Raises HeadsError.

    On the answers of `recipe.evaluate.on`, or on those that were held out from training.
    """
    _check_outputs(recipe)
    if recipe.evaluate.on is not None:
        on, states, held_out = recipe.evaluate.on, recipe.work / "evaluated", None
    else:
        tuned = recipe.train.mode == "finetune"
        on, states = recipe.answers_path, recipe.work / ("tuned-states" if tuned else "states")
        held_out = _held_out(recipe)
    report = evaluate(recipe.output, recipe.served_target, on, states, held_out)
    return _write_report(recipe, report)


def _check_outputs(recipe: Recipe) -> None:
    """Raise HeadsError for outputs that could not be written in the end."""
    if recipe.report_path.is_dir():
        raise HeadsError(f"json: found {recipe.report_path}, a folder; expected a file to write")
    check_plot_path(recipe.plot_path)  # the picture lies beside it, unless named
    if recipe.work.is_file():
        raise HeadsError(f"work: found {recipe.work}, a file; expected a folder, there or not")


def _held_out(recipe: Recipe) -> float:
    """The share held out when the heads were trained, whatever the recipe says by now."""
    try:
        made = json.loads((recipe.output / PROVENANCE_FILE).read_text(encoding="utf-8"))
        return float(made["recipe"]["train"]["validation"])
    except (OSError, ValueError, KeyError, TypeError):
        return recipe.train.validation


def _write_report(recipe: Recipe, report: dict[str, Any]) -> dict[str, Any]:
    target = Path(recipe.served_target).name
    report = {"heads": recipe.output.name, "target": target, **report}
    write_json(recipe.report_path, report)
    write_plot(recipe.plot_path, report)
    return report
