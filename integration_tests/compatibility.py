"""Makes docs/compatibility.md from what `make test-matrix` noted.

Run as `python -m integration_tests.compatibility OUTPUT VERDICTS...`, with one file
`verdicts-RELEASE.json` for each release. The table is always written; it fails if any test failed,
with a row or without, if a row or a cell lacks tests that it should have, or a file is missing, cut
short, or of another release than its name says.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.harness.combos import COMBOS, RELEASES
from integration_tests.harness.verdicts import other_release, release_of

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


ALONE = "without an engine"
NO_TEST = "no test"


@dataclass
class Run:
    """What all files say together."""

    verdicts: list[dict[str, Any]]
    problems: list[str]  # for which the table is not to be believed, or not whole


def load(paths: list[Path]) -> Run:
    """All verdicts, each with its column: a combination, or `ALONE` and the release beside it.

    Of a test that was run again the later file's verdict counts.
    """
    found, problems, releases = {}, [], set()
    for path in paths:
        if not path.is_file():
            problems.append(f"{path.name}: no such file; pytest did not get to its end")
            continue
        written = json.loads(path.read_text(encoding="utf-8"))
        if other_release(path, written["vllm"]):
            problems.append(f"{path.name}: left out, for it was run on vLLM {written['vllm']}")
            continue
        releases.add(release_of(path))
        release = ".".join(written["vllm"].split(".")[:2])
        if written.get("status"):
            problems.append(f"{path.name}: pytest ended with status {written['status']}")
        problems += [f"failed: {test} ({path.name})" for test in written.get("failed", [])]
        for verdict in written["verdicts"]:
            column = verdict["combo"] or f"{ALONE}, {release}"
            found[verdict["row"], column, verdict["test"]] = {**verdict, "column": column}
    problems += [f"no verdicts of vLLM {name}" for name in RELEASES if name not in releases]
    return Run(list(found.values()), problems)


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
        return "not run" if row else NO_TEST
    failed = [verdict for verdict in verdicts if verdict["outcome"] == "failed"]
    passed = [verdict for verdict in verdicts if verdict["outcome"] == "passed"]
    letters = "".join(
        letter
        for mode, letter in LETTERS.items()
        if any(verdict["mode"] == mode for verdict in passed)
    )
    missing = len(row - kinds(verdicts))
    if not passed and not failed:
        text = "not run" if missing else "n/a"
    else:
        text = f"**fails** ({len(failed)} of {len(verdicts)})" if failed else "holds"
        text += f" {letters}" if letters else ""
        counts = [str(len(passed))] if passed else []
        counts += [f"{missing} not run"] if missing else []
        text += f" ({'; '.join(counts)})" if counts else ""
    reasons = dict.fromkeys(v["reason"] for v in verdicts if v["outcome"] in ("skipped", "xfailed"))
    for reason in filter(None, reasons):
        if reason not in notes:
            notes.append(reason)
        text += f" [{notes.index(reason) + 1}]"
    return text


def alone(by_release: dict[str, list[dict[str, Any]]], notes: list[str]) -> str:
    """The cell of a row's tests without an engine: the same for all releases, or each its own."""
    found = {
        release: cell(verdicts, set(), notes) if verdicts else "not run"
        for release, verdicts in by_release.items()
    }
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{release}: {text}" for release, text in found.items())


class Cells:
    """The verdicts by row and column."""

    def __init__(self, verdicts: list[dict[str, Any]]) -> None:
        """Sort them; a release whose matrix was not run has no columns."""
        self.of: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for verdict in verdicts:
            self.of[verdict["row"], verdict["column"]].append(verdict)
        ran = {verdict["column"] for verdict in verdicts}
        self.names = [combo.name for combo in COMBOS if combo.name in ran]
        self.left_out = [combo.name for combo in COMBOS if combo.name not in ran]

    def everywhere(self, row: str) -> set[str]:
        """The tests of a row that every combination should have run."""
        return kinds([verdict for name in self.names for verdict in self.of[row, name]])

    def alone(self, row: str) -> dict[str, list[dict[str, Any]]]:
        """By release, the verdicts of a row's tests without an engine."""
        return {release: self.of[row, f"{ALONE}, {release}"] for release in RELEASES}

    def problems(self) -> list[str]:
        """Columns that were not run, rows without a test, cells that lack tests others have."""
        found = [f"not run: {name}" for name in self.left_out]
        for row in ROWS:
            wanted, beside = self.everywhere(row), self.alone(row)
            for name in self.names:
                missing = wanted - kinds(self.of[row, name])
                found += [f"not run on {name}: {row}, {test}" for test in sorted(missing)]
            if any(beside.values()):
                found += [
                    f"not run beside {release}: {row}" for release in beside if not beside[release]
                ]
            if not any(self.of[row, name] for name in self.names) and not any(beside.values()):
                found.append(f"no test: {row}")
        return found


def table(cells: Cells) -> str:
    """The whole document."""
    notes: list[str] = []
    left_out = [name.replace("-", " ") for name in cells.left_out]
    columns = [*(name.replace("-", " ") for name in cells.names), ALONE]
    lines = [
        "# What works with `bpd`",
        "",
        "Made by `make test-matrix`; do not edit. Each cell is the verdict of the tests of that "
        "row on that vLLM release and model runner: drafts by random heads (R), by an oracle that "
        "is always right (O), by one whose every third draft is wrong (M), and by random heads "
        "with a lattice together with each request's own text (L), all against the same requests "
        "without speculation; in brackets the number of tests that passed, and how many "
        "were run in other columns alone. Tests that start no engine are counted in the last "
        f'column, once for each release they ran beside; "{NO_TEST}" is a row that has no test '
        "of that column." + (f" Not run: {', '.join(left_out)}." if left_out else ""),
        "",
        f"| row | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    for row in ROWS:
        of_row = cells.everywhere(row)
        found = [cell(cells.of[row, name], of_row, notes) for name in cells.names]
        beside = cells.alone(row)
        found.append(alone(beside, notes) if any(beside.values()) else NO_TEST)
        lines.append(f"| {row} | {' | '.join(found)} |")
    lines += ["", "Notes:", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    lines += ["", "What each row holds:", ""]
    lines += [f"- **{row}**: {what}" for row, what in ROWS.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the document; say what fails."""
    output, *paths = map(Path, sys.argv[1:])
    run = load(paths)
    unknown = sorted({verdict["row"] for verdict in run.verdicts} - ROWS.keys())
    if unknown:
        sys.exit(f"row: found {', '.join(unknown)}; expected one of {', '.join(ROWS)}")
    cells = Cells(run.verdicts)
    output.write_text(table(cells), encoding="utf-8")
    failed = {verdict["test"] for verdict in run.verdicts if verdict["outcome"] == "failed"}
    told = "\n".join(run.problems)
    problems = [
        *run.problems,
        *(f"failed: {test}" for test in sorted(failed) if f"failed: {test} " not in told),
        *cells.problems(),
    ]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
