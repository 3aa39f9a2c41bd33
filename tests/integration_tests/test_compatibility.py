"""The table of `make test-matrix`, and what makes that command fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests import compatibility
from integration_tests.harness.combos import COMBOS, RELEASES

REPOSITORY = Path(__file__).resolve().parents[2]
FIRST = RELEASES[0]


def verdict(row: str, test: str, combo: str | None, **more: Any) -> dict[str, Any]:
    """One that passed, on every combination if its name says on which."""
    found = {"row": row, "test": test, "combo": combo, "everywhere": combo is not None}
    return found | {"mode": None, "outcome": "passed", "reason": ""} | more


def whole() -> dict[str, dict[str, Any]]:
    """By release, the files of a run in which all is well: each row one test on each engine."""
    files: dict[str, dict[str, Any]] = {
        release: {"vllm": f"{release}.0+cpu", "status": 0, "failed": [], "verdicts": []}
        for release in RELEASES
    }
    files[FIRST]["verdicts"] = [
        verdict(row, f"test_{row}[{combo.name}]", combo.name)
        for row in compatibility.ROWS
        for combo in COMBOS
    ]
    for written in files.values():
        written["verdicts"] += [verdict("faults", f"test_lock_{n}", None) for n in range(2)]
    return files


def make(
    monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, dict[str, Any]]
) -> tuple[str, dict[str, list[str]]]:
    """What the command fails with, and the table it wrote: by row, its cells."""
    paths = [folder / f"verdicts-{release}.json" for release in RELEASES]
    for release, path in zip(RELEASES, paths, strict=True):
        if release in files:
            path.write_text(json.dumps(files[release]), encoding="utf-8")
    output = folder / "table.md"
    monkeypatch.setattr(sys, "argv", ["compatibility", str(output), *map(str, paths)])
    said = ""
    try:
        compatibility.main()
    except SystemExit as end:
        said = str(end.code)
    lines = output.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:2] == "| "]
    return said, {row: found for row, *found in cells}


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said, table = make(monkeypatch, tmp_path, whole())
    assert said == ""
    assert table["row"][-1] == compatibility.ALONE
    assert table["stops"] == ["holds (1)"] * len(COMBOS) + ["no test"]
    # What starts no engine is no verdict on one.
    assert table["faults"] == ["holds (1)"] * len(COMBOS) + ["holds (2)"]


def test_a_failure_without_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = whole()
    files[FIRST] |= {"status": 1, "failed": ["test_lattice.py::test_ids"]}
    said, table = make(monkeypatch, tmp_path, files)
    assert f"failed: test_lattice.py::test_ids (verdicts-{FIRST}.json)" in said
    assert "pytest ended with status 1" in said
    assert table["stops"][0] == "holds (1)"


@pytest.mark.parametrize("named", [True, False])
def test_a_failure_in_a_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool) -> None:
    files, combo = whole(), COMBOS[1].name
    test = f"test_stops[{combo}]"
    [one] = [v for v in files[FIRST]["verdicts"] if v["test"] == test]
    one["outcome"] = "failed"
    files[FIRST]["failed"] = [test] if named else []
    said, table = make(monkeypatch, tmp_path, files)
    assert said.count(f"failed: {test}") == 1
    assert table["stops"][:2] == ["holds (1)", "**fails** (1 of 1)"]


def test_a_cell_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, combo = whole(), COMBOS[3].name
    kept = [v for v in files[FIRST]["verdicts"] if v["test"] != f"test_stops[{combo}]"]
    files[FIRST]["verdicts"] = kept
    said, table = make(monkeypatch, tmp_path, files)
    assert said == f"not run on {combo}: stops, test_stops[]"
    assert table["stops"][3] == "not run"


def test_a_row_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = whole()
    kept = [v for v in files[FIRST]["verdicts"] if v["row"] != "LoRA"]
    files[FIRST]["verdicts"] = kept
    said, _ = make(monkeypatch, tmp_path, files)
    assert said == "no test: LoRA"


def test_a_combination_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, combo = whole(), COMBOS[2].name
    kept = [v for v in files[FIRST]["verdicts"] if v["combo"] != combo]
    files[FIRST]["verdicts"] = kept
    said, _ = make(monkeypatch, tmp_path, files)
    assert said == f"not run: {combo}"


def test_a_release_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = whole()
    del files["0.33"]
    said, table = make(monkeypatch, tmp_path, files)
    assert "verdicts-0.33.json: no such file" in said
    assert "no verdicts of vLLM 0.33" in said
    assert table["faults"][-1] == f"{FIRST}: holds (2), 0.33: not run, 0.29: holds (2)"


def test_a_file_of_another_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = whole()
    files["0.33"]["vllm"] = "0.32.0+cpu"
    said, _ = make(monkeypatch, tmp_path, files)
    assert "verdicts-0.33.json: left out, for it was run on vLLM 0.32.0+cpu" in said
    assert "no verdicts of vLLM 0.33" in said


def test_tests_without_an_engine_that_fail_beside_one_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = whole()
    files["0.33"]["verdicts"][0]["outcome"] = "failed"
    said, table = make(monkeypatch, tmp_path, files)
    assert said == "failed: test_lock_0"
    assert table["faults"][-1] == (
        f"{FIRST}: holds (2), 0.33: **fails** (1 of 2) (1), 0.29: holds (2)"
    )
    files["0.33"]["verdicts"] = []
    said, _ = make(monkeypatch, tmp_path, files)
    assert said == "not run beside 0.33: faults"


# In place of Python in the Makefile: notes how it is called, and fails where the test says.
PYTHON = """#!/bin/sh
echo "${PYTHONPATH:-none}: $*" >> calls
case "$*" in
    *releases*) echo "/tree" ;;
    *compatibility*) touch written ;;
esac
case "$*" in *FAILING*) exit 1 ;; esac
"""


@pytest.mark.parametrize(
    ("failing", "fine"),
    [
        ("nothing", True),
        ("--verdicts=build/verdicts-0.32.json", False),  # pytest on the installed release
        ("--verdicts=build/verdicts-0.29.json", False),
        ("releases 0.33", False),
        ("integration_tests.compatibility", False),
    ],
)
def test_the_command_fails_if_any_part_does(tmp_path: Path, failing: str, fine: bool) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON.replace("FAILING", f'"{failing}"'), encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    makefile = REPOSITORY / "Makefile"
    overrides = ["PYTHON=true", "ON_CPU=", f"VENV_PYTHON={python}", "ARGS=--durations=3 "]
    done = subprocess.run(
        ["make", "-f", str(makefile), "test-matrix", *overrides],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == fine, done.stderr
    assert (tmp_path / "written").is_file()  # the table is made whatever failed
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    runs = [call.partition(":")[0] for call in calls if "-m pytest" in call]
    # Without the tree of a release nothing is run as if it were there.
    assert runs == ["none", "/tree", "/tree"][: 2 if "releases" in failing else 3]
