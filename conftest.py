"""What one process of a parallel run (`pytest --dist loadgroup`, as `make test` runs) takes whole.

Tests of one engine combination share a live engine, so one process takes them all; every other
file's tests share what its fixtures make.
"""

from __future__ import annotations

from typing import Any

import pytest

# These compare what one engine did with what the next one does.
_COMPARE_ENGINES = {"test_exactness.py", "test_harness.py", "test_lattice.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its group."""
    for item in items:
        combo: Any = getattr(getattr(item, "callspec", None), "params", {}).get("engine")
        if combo is None:
            group = item.path.as_posix()
        elif item.path.name in _COMPARE_ENGINES:
            group = "engines compared"
        else:
            group = f"engine {combo.name}"
        item.add_marker(pytest.mark.xdist_group(group))
