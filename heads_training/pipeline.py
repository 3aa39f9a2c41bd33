"""From answers on disk to a heads checkpoint: states, training, held-out figures, provenance."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from heads_training.dataset import describe
from heads_training.evaluate import evaluate_rows, write_json
from heads_training.hidden_states import write_states
from heads_training.provenance import provenance
from heads_training.target import read_rows
from heads_training.train import TrainConfig, prepare, train
from vllm_bpd.checkpoint import require_replaceable, save_heads

logger = logging.getLogger(__name__)

PROVENANCE_FILE = "provenance.json"


def train_checkpoint(
    config: TrainConfig, target: str, answers: Path, work: Path, output: Path, command: str
) -> dict[str, Any]:
    """Train heads of `target` on `answers` and write them, with provenance, to `output`.

    `work` keeps hidden states, training state and log, so that the same call goes on after an
    interruption. `command` goes into the provenance. Returns the walk's report on the held-out
    answers. Raises HeadsError for bad input.
    """
    require_replaceable(output)  # now, not after hours of training
    shards = write_states(target, answers, work / "states")
    data = prepare(config, shards, read_rows(target))
    counts = describe(data.texts)
    logger.info(
        "%d answers, %d answer tokens, %d loops; draft vocabulary covers %.4f of held-out tokens",
        counts["records"],
        counts["answer_tokens"],
        counts["loops"],
        data.coverage,
    )
    trained = train(config, data, work)
    # Written first, so that a failing evaluation loses nothing; then evaluated as stored.
    save_heads(output, trained.heads, data.draft_ids_V)
    report = evaluate_rows(output, data.target, data.texts, data.held_out_T)
    text = provenance(command, Path(target).name, config, data, trained, report, answers)
    save_heads(output, trained.heads, data.draft_ids_V, extra_files={PROVENANCE_FILE: text})
    write_json(work / "validation.json", report)
    return report
