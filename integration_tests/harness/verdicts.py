"""A pytest plugin that notes what each test of the matrix said: `-p ... --verdicts=FILE`.

A test belongs to the rows that its markers `row` name, to the combination of its `engine` or
`server` or of a marker's `combo` (without any: to the release of vLLM it ran beside), and to the
way of drafting that its `mode` names. The file also names every test that failed, whether or not
it has a row, and says how pytest ended.

A file `verdicts-RELEASE.json` holds what ran beside that release: pytest does not start beside
another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VERDICT = "verdict"  # the name of the reports' property
SELECTED = "selected"  # what a process of a parallel run was to run, in what it hands over
NO_REPORT = "no report came: the process that ran it died, or the run was cut short"


class Verdicts:
    """Collects them, in the process that writes the file."""

    def __init__(self) -> None:
        """Begin with none."""
        self.found: list[Any] = []
        self.failed: set[str] = set()
        self.selected: dict[str, list[Any]] = {}  # by test: its verdicts, without an outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test's report brings; that of a process that died brings no verdict."""
        self.found += [value for name, value in report.user_properties if name == VERDICT]
        if report.failed:
            self.failed.add(name_of(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take what could not be collected."""
        if report.failed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a process of a parallel run was to run; one that died tells nothing."""
        self.selected.update(getattr(node, "workeroutput", {}).get(SELECTED, {}))

    def written(self) -> list[Any]:
        """All verdicts: a failure where a test that was to run brought none, or failed later."""
        told = {(verdict["test"], verdict["row"]) for verdict in self.found}
        silent = [
            {**verdict, "outcome": "failed", "reason": NO_REPORT}
            for verdicts in self.selected.values()
            for verdict in verdicts
            if (verdict["test"], verdict["row"]) not in told
        ]
        return self.found + silent


COLLECTED = pytest.StashKey[Verdicts]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write the verdicts."""
    parser.addoption("--verdicts", type=Path, help="JSON file for the verdicts of the matrix")


def pytest_configure(config: pytest.Config) -> None:
    """Collect from all processes of a parallel run, in the first one."""
    path = config.getoption("--verdicts")
    if hasattr(config, "workerinput") or path is None:
        return
    if other_release(path, running_release()):
        raise pytest.UsageError(f"{path.name} is not for vLLM {running_release()}, which runs here")
    config.stash[COLLECTED] = Verdicts()
    config.pluginmanager.register(config.stash[COLLECTED])


def running_release() -> str:
    """The version of the vLLM that this process finds."""
    from vllm_bpd.patches import vllm_version

    return vllm_version()


def release_of(path: Path) -> str | None:
    """The release that a file of verdicts is named after, if it is."""
    named = re.fullmatch(r"verdicts-(\d+\.\d+)\.json", path.name)
    return named and named[1]


def other_release(path: Path, version: str) -> bool:
    """Whether the file is named after another release than that of `version`."""
    release = release_of(path)
    return release is not None and not version.startswith(f"{release}.")


def name_of(nodeid: str) -> str:
    """A test's name, without the group that a parallel run puts behind it."""
    return nodeid.partition("@")[0]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what is to be run, so that a test that is never heard of shows."""
    known = {name_of(item.nodeid): without_outcome(item) for item in session.items}
    selected = {name: verdicts for name, verdicts in known.items() if verdicts}
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[SELECTED] = selected
    elif COLLECTED in session.config.stash:
        session.config.stash[COLLECTED].selected.update(selected)


def without_outcome(item: pytest.Item) -> list[dict[str, Any]]:
    """What is known of a test's verdicts before it runs: one for each of its rows."""
    markers = list(item.iter_markers("row"))
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    engine = parameters.get("engine") or parameters.get("server")
    combos = [marker.kwargs["combo"] for marker in markers if "combo" in marker.kwargs]
    return [
        {
            "row": row,
            "test": name_of(item.nodeid),
            "combo": engine.name if engine is not None else combos[0] if combos else None,
            "everywhere": engine is not None,  # whether every combination has it
            "mode": parameters.get("mode"),
        }
        for marker in markers
        for row in marker.args
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a test's outcome: that of its call, of a set-up that did not get so far, of its end.

    On the report, which a parallel run's processes send to the one that writes the file.
    """
    report = yield
    if report.when == "call" or report.outcome != "passed":
        more = {"outcome": outcome(report), "reason": reason(report)}
        report.user_properties += [
            (VERDICT, {**verdict, **more}) for verdict in without_outcome(item)
        ]
    return report


def outcome(report: pytest.TestReport) -> str:
    """`xfailed` for what is expected to fail, else pytest's own word."""
    expected = hasattr(report, "wasxfail")
    return "xfailed" if expected and report.outcome == "skipped" else report.outcome


def reason(report: pytest.TestReport) -> str:
    """Why a test was skipped or expected to fail."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return ""


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was noted, and which release of vLLM tests without an engine ran beside."""
    if COLLECTED not in session.config.stash:
        return
    collected = session.config.stash[COLLECTED]
    path = session.config.getoption("--verdicts")
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {
        "vllm": running_release(),
        "status": int(exitstatus),
        "failed": sorted(collected.failed),
        "verdicts": collected.written(),
    }
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
