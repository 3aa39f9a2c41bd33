"""Makes docs/compatibility.md from what `make test-matrix` noted.

Run as `python -m integration_tests.compatibility OUTPUT VERDICTS...`. It fails if a row of the
matrix has no test at all, or a cell has a failure.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from integration_tests.harness.combos import COMBOS

# The matrix: each row, and what must hold in it.
ROWS = {
    "lengths": "answers that end at `max_model_len`, at `max_tokens` 1 to k + 2, at an end of text "
    "at every offset in a block; long beside short",
    "batching": "chunked prefill, cached prefixes, prefill beside decode, more requests than slots",
    "preemption": "requests preempted and resumed",
    "abort": "half of 32 streams dropped half-way, again and again; memory flat",
    "stops": "stop strings and ids at every offset, `min_tokens` 1 to k + 2, `ignore_eos`",
    "sampling parameters": "penalties, `bad_words`, `allowed_token_ids`; `min_p` and `logit_bias` "
    "refused by the engine",
    "logprobs": "`logprobs`, `prompt_logprobs`: the target's, right rows",
    "sampling": "temperature, `top_p`, `top_k`: the distribution kept; seeds, `n`, beam search",
    "structure": "JSON schema, regex, grammar, choice, tool calls, thirty at once; a thought's end "
    "in a block",
    "LoRA": "two adapters and the base in one batch",
    "targets": "Llama, Qwen, Mistral and Gemma kinds, tied and not, odd vocabularies, sliding "
    "windows, int8",
    "runners": "asynchronous scheduling on and off (V2): equal ids, equal acceptance",
    "drafts fewer than heads": "`num_speculative_tokens` 1 to k - 1; dynamic schedules",
    "numerics": "bfloat16 and float16: another token only where the two best are within rounding",
    "metrics": "engine counters against a count by hand, by position, `/metrics`",
    "checkpoints": "fields, tensors, damaged and malicious files: one clear line",
    "config fuzz": "any options: a valid engine config or one clear error",
    "upgrade": "a vLLM that differs is refused by name; other methods unaffected",
    "faults": "a worker killed, a full disk, two trainings in one folder",
}
LETTERS = {"heads": "R", "oracle": "O", "corrupted": "M", "lattice": "L"}


def load(paths: list[Path]) -> list[dict[str, Any]]:
    """All verdicts; those without a combination count for both runners of their release.

    Of a test that was run again the later file's verdict counts.
    """
    found = {}
    for path in paths:
        written = json.loads(path.read_text(encoding="utf-8"))
        release = ".".join(written["vllm"].split(".")[:2])
        for verdict in written["verdicts"]:
            combos = [verdict["combo"]]
            if verdict["combo"] is None:
                combos = [combo.name for combo in COMBOS if combo.release == release]
            on_an_engine = verdict["combo"] is not None
            for combo in combos:
                more = {"combo": combo, "on_an_engine": on_an_engine}
                found[verdict["row"], combo, verdict["test"]] = {**verdict, **more}
    return list(found.values())


def kinds(verdicts: list[dict[str, Any]]) -> set[str]:
    """The tests among these that every combination has: their names without the combination."""
    return {
        verdict["test"].replace(verdict["combo"], "")
        for verdict in verdicts
        if verdict["everywhere"]
    }


def cell(verdicts: list[dict[str, Any]], row: set[str], notes: list[str]) -> str:
    """One cell: what holds, how it drafted, how many tests; engine faults as numbered notes.

    `row` has the tests that some combination ran in this row: those that this one lacks are told.
    """
    if not verdicts:
        return "not run"
    failed = [verdict for verdict in verdicts if verdict["outcome"] == "failed"]
    passed = [verdict for verdict in verdicts if verdict["outcome"] == "passed"]
    letters = "".join(
        letter
        for mode, letter in LETTERS.items()
        if any(verdict["mode"] == mode for verdict in passed)
    )
    if not passed and not failed:
        text = "n/a"
    else:
        text = f"**fails** ({len(failed)} of {len(verdicts)})" if failed else "holds"
        text += f" {letters}" if letters else ""
        missing = len(row - kinds(verdicts))
        counts = [str(len(passed))] if passed else []
        counts += [f"{missing} not run"] if missing else []
        text += f" ({'; '.join(counts)})" if counts else ""
    for reason in dict.fromkeys(v["reason"] for v in verdicts if v["outcome"] != "passed"):
        if reason:
            if reason not in notes:
                notes.append(reason)
            text += f" [{notes.index(reason) + 1}]"
    return text


def table(verdicts: list[dict[str, Any]]) -> str:
    """The whole document."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        cells[verdict["row"], verdict["combo"]].append(verdict)
    notes: list[str] = []
    # A release whose own tests are few (conftest.py) gets a column once its matrix was run.
    ran = {verdict["combo"] for verdict in verdicts if verdict["on_an_engine"]}
    names = [combo.name for combo in COMBOS if combo.name in ran]
    left_out = [combo.name.replace("-", " ") for combo in COMBOS if combo.name not in ran]
    lines = [
        "# What works with `bpd`",
        "",
        "Made by `make test-matrix`; do not edit. Each cell is the verdict of the tests of that "
        "row on that vLLM release and model runner: drafts by random heads (R), by an oracle that "
        "is always right (O), by one whose every third draft is wrong (M), and by random heads "
        "with a lattice together with each request's own text (L), all against the same requests "
        "without speculation; in brackets the number of tests that passed, and how many "
        "were run in other columns alone."
        + (f" Not run: {', '.join(left_out)}." if left_out else ""),
        "",
        "| row | " + " | ".join(name.replace("-", " ") for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for row in ROWS:
        of_row = kinds([verdict for name in names for verdict in cells[row, name]])
        found = (cell(cells[row, name], of_row, notes) for name in names)
        lines.append(f"| {row} | {' | '.join(found)} |")
    lines += ["", "Notes:", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    lines += ["", "What each row holds:", ""]
    lines += [f"- **{row}**: {what}" for row, what in ROWS.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the document; say what fails."""
    output, *paths = map(Path, sys.argv[1:])
    verdicts = load(paths)
    unknown = sorted({verdict["row"] for verdict in verdicts} - ROWS.keys())
    if unknown:
        sys.exit(f"row: found {', '.join(unknown)}; expected one of {', '.join(ROWS)}")
    output.write_text(table(verdicts), encoding="utf-8")
    empty = [row for row in ROWS if not any(verdict["row"] == row for verdict in verdicts)]
    failed = sorted({verdict["test"] for verdict in verdicts if verdict["outcome"] == "failed"})
    if empty or failed:
        sys.exit(
            "\n".join([*(f"no test: {row}" for row in empty), *(f"failed: {t}" for t in failed)])
        )


if __name__ == "__main__":
    main()
