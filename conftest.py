"""What one process of a parallel run (`pytest --dist loadgroup`) takes whole.

Tests of one engine combination share a live engine, so in `make test` one process takes them all;
every other file's tests share what its fixtures make. In `make test-matrix` combinations share
what the target alone answered, so one process takes a file.
"""

from __future__ import annotations

from typing import Any

import pytest

# These compare what one engine did with what the next one does.
_COMPARE_ENGINES = {"test_exactness.py", "test_harness.py", "test_lattice.py"}
# Its engines are compared with nothing but numbers, and some take half an hour.
_SHARE_NOTHING = {"test_matrix_sampling.py"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its group."""
    matrix = config.getoption("verdicts", default=None) is not None
    for item in items:
        combo: Any = getattr(getattr(item, "callspec", None), "params", {}).get("engine")
        if matrix and item.path.name not in _SHARE_NOTHING:
            group = item.path.as_posix()
        elif item.path.name in _COMPARE_ENGINES:
            group = "engines compared"
        elif combo is None:
            group = item.path.as_posix()
        else:
            group = f"engine {combo.name}"
        item.add_marker(pytest.mark.xdist_group(group))
