"""Heads trained in several ways and judged on the same answers: what the comparisons share.

A trial that is finished lies in its folder with its figures, and is not trained again, so that a
comparison of hours goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.drafters import measure, variants
from heads_training.dataset import Texts, read_texts, split_held_out
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import fit_weights, make_lattice
from heads_training.recipe import make_recipe, read_recipe
from heads_training.target import TargetRows, read_rows
from heads_training.train import TrainConfig, prepare, train
from vllm_bpd.arguments import output_file
from vllm_bpd.checkpoint import load_heads, save_heads
from vllm_bpd.errors import HeadsError, read_json

FIGURES_FILE = "figures.json"
JUDGED = ("heads", "lattice", "lattice, cut 0.1")  # of the drafters that benchmarks.drafters knows


@dataclass(frozen=True)
class Trial:
    """One way to train."""

    name: str  # also its folder's
    config: TrainConfig
    shards: Sequence[Path]  # hidden states that it is trained on


@dataclass(frozen=True)
class Ground:
    """What all trials of a comparison share."""

    target: TargetRows
    shards: list[Path]  # hidden states of the answers for training, in the order of the files
    judged: list[Path]  # of the answers that nothing is trained on
    work: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every comparison has."""
    parser.add_argument("--target", required=True, help="model folder")
    parser.add_argument(
        "--answers", required=True, type=Path, help="folder of answers to train on, or a file"
    )
    parser.add_argument(
        "--judge", required=True, type=Path, help="folder of answers to judge on, or a file"
    )
    parser.add_argument("--config", required=True, help="recipe, or the name of one that ships")
    parser.add_argument("--work", type=Path, default=Path("bpd-trials"), help="what is kept")
    parser.add_argument("--output", type=output_file, help="JSON file for the figures")


def read_config(arguments: argparse.Namespace) -> TrainConfig:
    """The recipe's training options. Raises HeadsError."""
    return make_recipe(read_recipe(arguments.config), {"target": arguments.target}).train


def require_k(k: int, places: int) -> None:
    """Raise HeadsError unless blocks of `k` can be drafted at so many places."""
    if not 2 <= k <= places + 1:
        raise HeadsError(
            f"k: found {k}; expected 2 to {places + 1}, as {places} tokens are drafted"
        )


def read_ground(arguments: argparse.Namespace, config: TrainConfig) -> Ground:
    """Hidden states, made where they are missing. Raises HeadsError."""
    work: Path = arguments.work
    return Ground(
        read_rows(arguments.target),
        write_states(arguments.target, arguments.answers, work / "states", config.reads_prompts),
        write_states(arguments.target, arguments.judge, work / "judged"),
        work,
    )


def answer_tokens(shard: Path) -> int:
    """Answer tokens of a shard, without reading its hidden states."""
    with safe_open(shard, framework="pt") as file:
        lengths_R, of_prompt_R = file.get_tensor("answer_lengths"), file.get_tensor("of_prompt")
    return int(lengths_R[~of_prompt_R].sum())


def run_trials(ground: Ground, trials: Sequence[Trial]) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Each trial with its figures, as soon as they are there. Raises HeadsError for bad input."""
    for trial in trials:
        folder = ground.work / trial.name
        made_with = {
            "config": trial.config.made_with(),
            "lattice_places": trial.config.lattice_places,
            "answers": {shard.name: answer_tokens(shard) for shard in trial.shards},
            "judged": {shard.name: answer_tokens(shard) for shard in ground.judged},
            "target": str(ground.target.fingerprint),
        }
        found = _finished(folder, made_with)
        if found is None:
            found = {"made with": made_with} | _run(ground, trial, folder)
            partial = folder / f"{FIGURES_FILE}.partial"
            partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            partial.replace(folder / FIGURES_FILE)
        yield trial, found


def _finished(folder: Path, made_with: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of the same trial, if it ended; what cannot be read counts as none."""
    try:
        found = read_json(folder / FIGURES_FILE, "figures of a trial")
    except HeadsError:
        return None
    # As they look behind JSON: a tuple is a list there.
    return found if found.get("made with") == json.loads(json.dumps(made_with)) else None


def _run(ground: Ground, trial: Trial, folder: Path) -> dict[str, Any]:
    """Train, fit the lattice on held-out answers, judge."""
    config = trial.config
    data = prepare(config, trial.shards, ground.target)
    trained = train(config, data, folder / "training")
    save_heads(folder / "heads", trained.heads, data.draft_ids_V)
    heads, draft_ids_V = load_heads(folder / "heads", torch.bfloat16)
    places = max(config.lattice_places, config.num_draft_heads)

    def candidates(texts: Texts, rows_T: Tensor) -> Any:
        return make_lattice(heads, texts, rows_T, ground.target, draft_ids_V, places)

    held_out_T = split_held_out(data.texts, config.validation)[0]
    weights_PF = fit_weights(candidates(data.texts, held_out_T), places)
    save_heads(folder / "heads", trained.heads, data.draft_ids_V, lattice_weights_PW=weights_PF)
    judged = read_texts(ground.judged, config.num_draft_heads)
    found = variants(candidates(judged, torch.arange(judged.rows)), weights_PF)
    of_prompt_T = data.texts.of_prompt_R[data.texts.record_T[data.train_T]]
    return {
        "trained_tokens": int((~of_prompt_T).sum()),  # of answers
        "trained_prompt_tokens": int(of_prompt_T.sum()),
        "steps": config.steps,
        "seconds": round(trained.seconds, 1),
        "checkpoint_bytes": (folder / "heads" / "model.safetensors").stat().st_size,
        **measure({name: found[name] for name in JUDGED}, judged),
    }


def draw(path: Path, xlabel: str, sizes: Sequence[int], rows: Sequence[Any], k: str) -> None:
    """A picture of tokens a step at `k`, over all answers: a line a drafter, a point a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in JUDGED:
        found = [row["drafters"][name]["all"][k]["tokens_per_step"] for row in rows]
        axes.plot(sizes, found, marker="o", label=name)
    axes.set(title=f"tokens a step, k = {k}", xlabel=xlabel, xscale="log")
    axes.legend()
    figure.savefig(path)
