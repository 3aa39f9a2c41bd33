"""What a run of pytest leaves behind: verdicts, failures without a row, tests never heard of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.verdicts import NO_REPORT, other_release, running_release

REPOSITORY = Path(__file__).resolve().parents[2]
INI = "[pytest]\nmarkers =\n    row(names, combo)\n    full\n"
HEADER = "import os\nimport pytest\n"
RELEASE = ".".join(running_release().split(".")[:2])


def play(folder: Path, tests: str, *options: str, name: str | None = None) -> tuple[int, Any]:
    """The exit status of a run of `tests`, and the file it wrote."""
    (folder / "pytest.ini").write_text(INI, encoding="utf-8")
    (folder / "test_made.py").write_text(HEADER + tests, encoding="utf-8")
    path = folder / (name or f"verdicts-{RELEASE}.json")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "integration_tests.harness.verdicts",
            f"--verdicts={path}", *options, "test_made.py",
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else done.stderr
    return done.returncode, written


def outcomes(written: Any) -> dict[str, str]:
    """By test and row, the last outcome that was noted."""
    return {
        f"{verdict['test'].partition('::')[2]}, {verdict['row']}": verdict["outcome"]
        for verdict in written["verdicts"]
    }


def test_failures_without_a_row_are_named(tmp_path: Path) -> None:
    status, written = play(
        tmp_path,
        '@pytest.mark.row("stops")\ndef test_right(): pass\n'
        "@pytest.mark.full\ndef test_wrong(): assert 0\n"
        "@pytest.fixture\ndef broken(): yield; assert 0\n"
        '@pytest.mark.row("aborts")\ndef test_end(broken): pass\n'
        '@pytest.mark.row("faults", combo="0.32-V1")\n@pytest.mark.xfail(reason="theirs")\n'
        "def test_known(): assert 0\n",
    )
    assert status == written["status"] == 1
    assert written["vllm"] == running_release()
    assert written["failed"] == ["test_made.py::test_end", "test_made.py::test_wrong"]
    assert outcomes(written) == {
        "test_right, stops": "passed",
        "test_end, aborts": "failed",
        "test_known, faults": "xfailed",
    }
    [known] = [one for one in written["verdicts"] if one["row"] == "faults"]
    assert (known["combo"], known["reason"], known["everywhere"]) == ("0.32-V1", "theirs", False)


def test_a_process_that_dies_takes_its_tests_verdict_along(tmp_path: Path) -> None:
    status, written = play(
        tmp_path,
        '@pytest.mark.row("stops")\ndef test_right(): pass\n'
        '@pytest.mark.row("abort", "faults")\ndef test_deadly(): os._exit(3)\n'
        '@pytest.mark.row("stops")\ndef test_too(): pass\n',
        "--numprocesses=2",
    )
    assert status == written["status"] == 1
    assert written["failed"] == ["test_made.py::test_deadly"]
    assert outcomes(written) == {
        "test_right, stops": "passed", "test_too, stops": "passed",
        "test_deadly, abort": "failed", "test_deadly, faults": "failed",
    }  # fmt: skip
    assert {one["reason"] for one in written["verdicts"]} == {"", NO_REPORT}


def test_what_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    status, written = play(tmp_path, "import no_such_module\n")
    assert status == written["status"] == 2
    assert written["failed"] == ["test_made.py"]


def test_a_run_that_is_cut_short_says_what_it_left_out(tmp_path: Path) -> None:
    status, written = play(
        tmp_path,
        "def test_first(): assert 0\n@pytest.mark.row('stops')\ndef test_second(): pass\n",
        "--maxfail=1",
    )
    assert status == written["status"] == 1
    assert outcomes(written) == {"test_second, stops": "failed"}


def test_only_what_was_selected_is_waited_for(tmp_path: Path) -> None:
    tests = "".join(
        f"@pytest.mark.row('stops')\ndef {name}(): pass\n" for name in ("test_a", "test_b")
    )
    status, written = play(tmp_path, tests, "-k", "test_a")
    assert (status, outcomes(written)) == (0, {"test_a, stops": "passed"})
    assert written["failed"] == []


def test_no_run_beside_another_release(tmp_path: Path) -> None:
    status, said = play(tmp_path, "def test_right(): pass\n", name="verdicts-0.1.json")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"verdicts-0.1.json is not for vLLM {running_release()}, which runs here" in said


def test_releases_are_told_apart_by_whole_numbers() -> None:
    assert other_release(Path("verdicts-0.3.json"), "0.32.0+cpu")
    assert other_release(Path("verdicts-0.33.json"), "0.32.0+cpu")
    assert not other_release(Path("verdicts-0.32.json"), "0.32.0+cpu")
    assert not other_release(Path("some.json"), "0.32.0+cpu")


@pytest.mark.parametrize("for_the_matrix", [True, False])
def test_a_release_that_cannot_be_had(tmp_path: Path, for_the_matrix: bool) -> None:
    path = tmp_path / f"verdicts-{RELEASE}.json"
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "integration_tests.harness.verdicts",
            *([f"--verdicts={path}"] if for_the_matrix else []),
            "integration_tests/test_harness.py::test_counters_by_hand[0.29-V1]",
        ],
        cwd=REPOSITORY,
        env=os.environ | nowhere | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    if not for_the_matrix:
        assert done.returncode == 0
        assert "1 skipped" in done.stdout
        return
    assert done.returncode == 1
    written = json.loads(path.read_text(encoding="utf-8"))
    test = "test_counters_by_hand[0.29-V1], metrics"
    assert (outcomes(written), len(written["failed"])) == ({test: "failed"}, 1)
