"""A pytest plugin that notes what each test of the matrix said: `-p ... --verdicts=FILE`.

A test belongs to the rows that its marker `row` names, to the combination of its `engine` or
`server`, or of the marker's `combo` (without any: to the release of vLLM it ran beside), and to
the way of drafting that its `mode` names.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VERDICT = "verdict"  # the name of the reports' property


class Verdicts:
    """Collects them, in the process that writes the file."""

    def __init__(self) -> None:
        """Begin with none."""
        self.found: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test's report brings."""
        self.found += [value for name, value in report.user_properties if name == VERDICT]


COLLECTED = pytest.StashKey[Verdicts]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write the verdicts."""
    parser.addoption("--verdicts", type=Path, help="JSON file for the verdicts of the matrix")


def pytest_configure(config: pytest.Config) -> None:
    """Collect from all processes of a parallel run, in the first one."""
    if not hasattr(config, "workerinput"):
        config.stash[COLLECTED] = Verdicts()
        config.pluginmanager.register(config.stash[COLLECTED])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a test's outcome once: that of its call, or of a set-up that did not get so far.

    On the report, which a parallel run's processes send to the one that writes the file.
    """
    report = yield
    marker = item.get_closest_marker("row")
    if marker is not None and (report.when == "call" or report.outcome != "passed"):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        combo = parameters.get("engine") or parameters.get("server")
        report.user_properties += [
            (
                VERDICT,
                {
                    "row": row,
                    "test": item.nodeid.partition("@")[0],  # behind it, a parallel run's group
                    "combo": marker.kwargs.get("combo") if combo is None else combo.name,
                    "everywhere": combo is not None,  # whether every combination has it
                    "mode": parameters.get("mode"),
                    "outcome": outcome(report),
                    "reason": reason(report),
                },
            )
            for row in marker.args
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was noted, and which release of vLLM tests without an engine ran beside."""
    path = session.config.getoption("--verdicts")
    if path is None or COLLECTED not in session.config.stash:
        return
    from vllm_bpd.patches import vllm_version

    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"vllm": vllm_version(), "verdicts": session.config.stash[COLLECTED].found}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
