"""What drafting's parts are, and that each is counted as it is served."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks import drafting
from benchmarks.drafting import Shape, measure, parts, whole

SMALL = Shape(heads=2, units=32, scored=64)


def test_only_the_named_field_grows() -> None:
    for name, shapes in Shape().grown().items():
        kept = [{k: v for k, v in asdict(shape).items() if k != name} for shape in shapes]
        assert all(values == kept[0] for values in kept)
        sizes = [getattr(shape, name) for shape in shapes]
        assert sizes == sorted(set(sizes))
        assert getattr(Shape(), name) in sizes


def test_every_part_is_timed() -> None:
    assert set(measure(SMALL, 1)) == set(parts(SMALL))


@pytest.mark.parametrize(
    ("requests", "expected"),
    [(4, ["int8", "int8", "int8"]), (5, ["int8", "int8", "bf16"]), (9, ["bf16"] * 3)],
)
def test_few_rows_are_counted_in_int8(
    requests: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads: five requests are ten rows of scores."""
    names = ("hidden layer", "output layer", "scores of the ids")
    cost = {"bf16": 1000.0, "int8": 100.0}
    named = dict.fromkeys(names, cost["bf16"])
    named |= {f"{name}, int8": cost["int8"] for name in names}
    named |= {"best ids": 10.0, "their normaliser": 1.0}
    monkeypatch.setattr(drafting, "parts", lambda _: named)
    monkeypatch.setattr(drafting, "milliseconds", lambda ms, _: ms)
    shape = Shape(requests=requests, heads=2)
    assert whole(shape, 1) == sum(cost[kind] for kind in expected) + 11
