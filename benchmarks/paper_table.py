"""The paper's Table 1 in small: k x {regular, distilled} x {frozen, fine-tuned}.

A small decoder-only model learns a made-up translation task (`benchmarks.paper_task`) from
references ("regular"), or from the greedy translations of a model that did ("distilled"). On each,
heads are trained by `heads_training`, with the base frozen or together with it, on the same text.
For every cell: the mean accepted block of greedy decoding on held-out sentences, by the exact walk
over the cell's own target's own greedy translations, and the share of these that are right.

It goes on where it was stopped: models and cells that are there are kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from benchmarks.paper_models import Pair, gold, train_base, translate, write_answers
from benchmarks.paper_task import Sentence, Task
from heads_training.evaluate import evaluate
from heads_training.hidden_states import write_states
from heads_training.target import read_rows
from heads_training.train import TrainConfig, prepare, train
from vllm_bpd.checkpoint import save_heads

RESULTS = Path(__file__).parent / "results" / "paper-table.json"
TEXTS = ("regular", "distilled")
MODES: tuple[Literal["frozen", "finetune"], ...] = ("frozen", "finetune")
# Mean accepted blocks of Stern et al. 2018 (arXiv 1811.03115), table 1: WMT 2014 English-German
# development set, greedy. (text, mode, k) to tokens.
PAPER = {
    ("regular", "frozen", 4): 1.73,
    ("distilled", "frozen", 4): 1.85,
    ("regular", "finetune", 4): 2.69,
    ("distilled", "finetune", 4): 3.27,
    ("regular", "frozen", 8): 1.76,
    ("distilled", "frozen", 8): 1.91,
    ("regular", "finetune", 8): 3.01,
    ("distilled", "finetune", 8): 4.69,
}
_DEV = 400  # sentences held out


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    text: str
    mode: Literal["frozen", "finetune"]
    k: int

    @property
    def name(self) -> str:
        """Its folder's and its result's name."""
        return f"{self.text}-{self.mode}-k{self.k}"


def main() -> None:
    """Train what is missing, then print the table and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_table", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("paper-work"), help="models and data")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON, kept cell by cell")
    parser.add_argument("--table", type=Path, help="Markdown file that receives the table")
    parser.add_argument("--sentences", type=int, default=8000, help="training sentences")
    parser.add_argument("--base-steps", type=int, default=1500, help="steps of a base model")
    parser.add_argument("--frozen-steps", type=int, default=400, help="steps of frozen cells")
    parser.add_argument("--finetune-steps", type=int, default=600, help="steps of the others")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 6, 8], help="block sizes")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> None:
    """The measurement itself."""
    results = _read_results(arguments)
    task = Task()
    rng = random.Random(1)
    sentences = [task.draw(rng) for _ in range(arguments.sentences + _DEV)]
    train_set, dev = sentences[:-_DEV], sentences[-_DEV:]
    pairs = gold(task, train_set, seed=2)
    for text in TEXTS:
        base = arguments.work / text / "base"
        answers = arguments.work / text / "answers" / "answers-00000.jsonl"
        if text == "distilled":
            pairs = _distilled(arguments.work, train_set, task, pairs)
        if not base.exists():
            train_base(task.vocab_size, pairs, arguments.base_steps, base)
        if not answers.exists():
            write_answers(answers, pairs)
        if text not in results["bases"]:
            results["bases"][text] = _quality(task, dev, base)[1]
            _write_results(arguments.results, results)
        for k in arguments.k:
            for mode in arguments.modes:
                cell = Cell(text, mode, k)
                if cell.name not in results["cells"]:
                    steps = getattr(arguments, f"{mode}_steps")
                    made = train_cell(cell, arguments.work / text, steps, task, dev)
                    results["cells"][cell.name] = made
                    _write_results(arguments.results, results)
    table = format_table(results)
    print(table)
    if arguments.table:
        arguments.table.write_text(table + "\n", encoding="utf-8")


def _distilled(work: Path, train_set: list[Sentence], task: Task, pairs: list[Pair]) -> list[Pair]:
    """The training sources with the regular base's greedy translations."""
    path = work / "distilled" / "teacher.json"
    if not path.exists():
        said = translate(work / "regular" / "base", [source for source, _ in pairs])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(said), encoding="utf-8")
    said = json.loads(path.read_text(encoding="utf-8"))
    return [(task.source(s), target) for s, target in zip(train_set, said, strict=True)]


def train_cell(
    cell: Cell, folder: Path, steps: int, task: Task, dev: list[Sentence]
) -> dict[str, Any]:
    """Train one cell's heads on the text in `folder`, and measure them on `dev`."""
    started, work = time.monotonic(), folder / cell.name
    base, tuned = folder / "base", work / "target"
    config = TrainConfig(
        mode=cell.mode,
        tuned_target=tuned if cell.mode == "finetune" else None,
        num_draft_heads=cell.k - 1,
        head_hidden_size=96,
        activation="relu",
        conditioning="none",
        draft_vocab_size=0,
        # Small and trained briefly, the base would forget its task if its own loss were one of k.
        head_loss="weighted" if cell.mode == "finetune" else "mean",
        distillation=0.0,  # a matter of the text here
        steps=steps,
        batch_size=1024,  # answer tokens; frozen
        batch_texts=32,
        learning_rate=2e-3,
        base_learning_rate=1e-3,
        weight_decay=0.01,
        validation=0.02,
        validate_every=steps,
        autocast=False,
    )
    shards = write_states(str(base), folder / "answers", folder / "states")
    data = prepare(config, shards, read_rows(str(base)))
    trained = train(config, data, work / "train")
    target = tuned if cell.mode == "finetune" else base
    save_heads(work / "heads", trained.heads, data.draft_ids_V)
    pairs, quality = _quality(task, dev, target)
    write_answers(work / "dev.jsonl", pairs)
    report = evaluate(work / "heads", str(target), work / "dev.jsonl", work / "dev-states")
    shutil.rmtree(work / "dev-states")
    return {
        "mean_accepted_block": report["by_k"][str(cell.k)]["k_hat"],
        "by_head": report["by_head"],
        **quality,
        "seconds": round(time.monotonic() - started, 1),
    }


def _quality(task: Task, dev: list[Sentence], target: Path) -> tuple[list[Pair], dict[str, Any]]:
    """The target's own greedy translations, and how many of them are right."""
    sources = [task.source(sentence) for sentence in dev]
    pairs = list(zip(sources, translate(target, sources), strict=True))
    right = sum(task.is_valid(s, said) for s, (_, said) in zip(dev, pairs, strict=True))
    return pairs, {"sentences": len(dev), "right": round(right / len(dev), 4)}


def _read_results(arguments: argparse.Namespace) -> dict[str, Any]:
    """Results so far. Stops for those of other sizes: cells would not compare."""
    sizes = ("sentences", "base_steps", "frozen_steps", "finetune_steps")
    made_by = {name: getattr(arguments, name) for name in sizes}
    if not arguments.results.exists():
        versions = {name: version(name) for name in ("torch", "transformers", "vllm-bpd")}
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        return {"arguments": made_by, **machine, "versions": versions, "bases": {}, "cells": {}}
    results: dict[str, Any] = json.loads(arguments.results.read_text(encoding="utf-8"))
    if results["arguments"] != made_by:
        raise SystemExit(
            f"{arguments.results}: found results of {results['arguments']}, this run has {made_by};"
            " name another file with --results"
        )
    return results


def _write_results(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def format_table(results: dict[str, Any]) -> str:
    """The table in Markdown, the paper's figures beside it, and whether the ordering shows."""
    cells = results["cells"]
    columns = [(text, mode) for mode in MODES for text in TEXTS]
    lines = [
        "| k | " + " | ".join(f"{text}, {mode}" for text, mode in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for k in sorted({int(name.rsplit("-k", 1)[1]) for name in cells}):
        row = [
            _entry(cells.get(Cell(text, mode, k).name), (text, mode, k)) for text, mode in columns
        ]
        lines.append(f"| {k} | " + " | ".join(row) + " |")
    bases = ", ".join(f"{text} {found['right']:.1%}" for text, found in results["bases"].items())
    lines += ["", f"Bases alone (k = 1), sentences right: {bases}.", "", *_ordering(cells)]
    return "\n".join(lines)


def _entry(cell: dict[str, Any] | None, key: tuple[str, str, int]) -> str:
    if cell is None:
        return "not run"
    paper = f" (paper {PAPER[key]:.2f})" if key in PAPER else ""
    return f"**{cell['mean_accepted_block']:.2f}**{paper}, {cell['right']:.1%} right"


def _ordering(cells: dict[str, Any]) -> list[str]:
    """One line for each comparison that the paper's table makes: in how many cells it shows."""
    lines = []
    for claim, pairs in (
        ("fine-tuned above frozen", [((t, "frozen"), (t, "finetune")) for t in TEXTS]),
        ("distilled above regular", [(("regular", m), ("distilled", m)) for m in MODES]),
    ):
        held, broken = 0, []
        for below, above in pairs:
            for k in range(2, 17):
                low, high = (cells.get(f"{text}-{mode}-k{k}") for text, mode in (below, above))
                if low is None or high is None:
                    continue
                if high["mean_accepted_block"] > low["mean_accepted_block"]:
                    held += 1
                else:
                    broken.append(f"k = {k}, {below[0]} {below[1]}")
        said = f"shows in {held} of {held + len(broken)} pairs"
        lines.append(f"- {claim}: {said}" + (f"; not for {'; '.join(broken)}" if broken else ""))
    return lines


if __name__ == "__main__":
    main()
