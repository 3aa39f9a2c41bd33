"""Fixtures of the real-engine tests: one live engine process a combination, and tiny targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.harness.combos import COMBOS, Combo
from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.matrix import LATTICE
from integration_tests.harness.releases import ReleaseError
from integration_tests.harness.targets import TARGETS, write_target

OLDEST = "0.29"
NEWEST_V2 = Combo("0.33", "V2")
# A lattice needs an engine of its own; `make test` starts it where texts are cut and come again.
_LATTICE_IN_TEST = {"test_matrix_text.py", "test_matrix_scheduling.py"}
_ROWS_WITHOUT = {"abort", "LoRA"}
_ON_ONE_RELEASE = {"test_lattice.py", "test_training_data.py"}


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
        pytest.skip(str(reason))
    yield process
    process.close()


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every tiny target, written once a session: name to checkpoint directory."""
    root = tmp_path_factory.mktemp("targets")
    return {name: write_target(target, root / name) for name, target in TARGETS.items()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs the matrix on one combination, `make test-matrix` on all.

    What our code does alike on all releases, it runs on the installed one. Of the oldest release
    one whole test tells whether it differs, on V1; of interpreted V2, which is slow, on the newest.
    """
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        combo = params.get("engine")
        if combo is None:
            continue
        matrix = item.path.name.startswith("test_matrix_") and combo != COMBOS[0]
        ours = item.path.name in _ON_ONE_RELEASE and combo.release != COMBOS[0].release
        whole = item.name.startswith("test_ids_and_counters")
        slow = item.path.name == "test_exactness.py" and combo == NEWEST_V2 and not whole
        oldest = combo.release == OLDEST and not (whole and combo.runner == "V1")
        lattice = params.get("mode") == LATTICE and (
            item.path.name not in _LATTICE_IN_TEST or params.get("row") in _ROWS_WITHOUT
        )
        if matrix or ours or slow or oldest or lattice:
            item.add_marker("full")
