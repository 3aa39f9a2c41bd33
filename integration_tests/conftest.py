"""Fixtures of the real-engine tests: one live engine process a combination, and tiny targets."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from integration_tests.harness.combos import COMBOS, Combo
from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.matrix import LATTICE
from integration_tests.harness.releases import ReleaseError
from integration_tests.harness.targets import TARGETS, write_target

HERE = Path(__file__).parent
OLDEST = "0.29"
NEWEST_V2 = Combo("0.33", "V2")
# A lattice needs an engine of its own; `make test` starts it where texts are cut and come again.
_LATTICE_IN_TEST = {"test_matrix_text.py", "test_matrix_scheduling.py", "test_matrix_defaults.py"}
_ROWS_WITHOUT = {"abort", "LoRA"}
_ON_ONE_RELEASE = {"test_lattice.py", "test_training_data.py"}
# What the first combination answers is what the others must.
_COMPARES_COMBOS = {"test_lattice.py", "test_harness.py"}


@pytest.fixture(scope="session", params=COMBOS, ids=lambda combo: combo.name)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """A live engine process; every test that asks for it runs on every combination."""
    combo: Combo = request.param
    log = tmp_path_factory.mktemp("engine") / f"{combo.name}.log"
    try:
        process = EngineProcess(combo, log)
    except ReleaseError as reason:
        if request.config.getoption("--verdicts", None) is not None:
            raise  # the matrix is nothing without it
        pytest.skip(str(reason))
    yield process
    process.close()


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every tiny target, written once a session: name to checkpoint directory."""
    root = tmp_path_factory.mktemp("targets")
    return {name: write_target(target, root / name) for name, target in TARGETS.items()}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark and group before pytest selects and pytest-xdist reads groups; the longest go first."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    for item in ours:
        if leave_to_the_matrix(item):
            item.add_marker("full")
        item.add_marker(pytest.mark.xdist_group(group(item)))
    yield
    items.sort(key=lambda item: not is_longest(item))


def combo_of(item: pytest.Item) -> Combo | None:
    """The combination of a test's `engine` or `server`, if it asks for one."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    combo: Combo | None = params.get("engine") or params.get("server")
    return combo


def group(item: pytest.Item) -> str:
    """What one process of a parallel run does: a file's tests that share an engine, or answers."""
    combo = combo_of(item)
    spread: Combo | None = getattr(getattr(item, "callspec", None), "params", {}).get("combo")
    if spread is not None:  # over several ranks: engines of one release are as many as all others
        return f"{item.path.stem}-{spread.release}"
    if combo is None or item.path.name in _COMPARES_COMBOS:
        return item.path.stem
    return f"{item.path.stem}-{combo.name}"


def is_longest(item: pytest.Item) -> bool:
    """Whether a test takes as long as many others: nobody wants to wait for it at the end."""
    combo = combo_of(item)
    interpreted = combo is not None and combo.runner == "V2"
    return interpreted and item.path.name == "test_matrix_sampling.py"


def leave_to_the_matrix(item: pytest.Item) -> bool:
    """`make test` runs the matrix on one combination, `make test-matrix` on all.

    What our code does alike on all releases, it runs on the installed one. Of the oldest release
    one whole test tells whether it differs, on V1; of interpreted V2, which is slow, on the newest.
    """
    combo = combo_of(item)
    if combo is None:
        return False
    matrix = item.path.name.startswith("test_matrix_") and combo != COMBOS[0]
    ours = item.path.name in _ON_ONE_RELEASE and combo.release != COMBOS[0].release
    whole = item.name.startswith("test_ids_and_counters")
    slow = item.path.name == "test_exactness.py" and combo == NEWEST_V2 and not whole
    oldest = combo.release == OLDEST and not (whole and combo.runner == "V1")
    params = item.callspec.params  # type: ignore[attr-defined]  # it has an engine
    lattice = params.get("mode") == LATTICE and (
        item.path.name not in _LATTICE_IN_TEST or params.get("row") in _ROWS_WITHOUT
    )
    return matrix or ours or slow or oldest or lattice
