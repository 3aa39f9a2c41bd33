"""Fixtures of the real-engine tests: one live engine process a combination, and tiny targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.harness.combos import COMBOS, Combo
from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.releases import ReleaseError
from integration_tests.harness.targets import TARGETS, write_target

_ON_ONE_RELEASE = {"test_lattice.py", "test_training_data.py"}


@pytest.fixture(scope="session", params=COMBOS, ids=lambda combo: combo.name)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """A live engine process; every test that asks for it runs on all four combinations."""
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
    """`make test` runs the matrix on one combination, `make test-matrix` on all four.

    What our code does alike on both releases, it runs on the older one.
    """
    for item in items:
        combo = getattr(getattr(item, "callspec", None), "params", {}).get("engine")
        if combo is None:
            continue
        matrix = item.path.name.startswith("test_matrix_") and combo != COMBOS[0]
        ours = item.path.name in _ON_ONE_RELEASE and combo.release != COMBOS[0].release
        # Interpreted V2 is slow; one whole test tells whether the newer release differs.
        slow = (
            item.path.name == "test_exactness.py"
            and combo == COMBOS[-1]
            and not item.name.startswith("test_ids_and_counters")
        )
        if matrix or ours or slow:
            item.add_marker("full")
