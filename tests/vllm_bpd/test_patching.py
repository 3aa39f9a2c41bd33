"""Replacing symbols of another package, tried on throw-away modules."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any, Literal, get_args

import pytest

from vllm_bpd import patching
from vllm_bpd.patching import (
    ABSENT,
    ATTRIBUTES,
    Patch,
    PatchError,
    apply,
    apply_unchecked,
    describe,
    state,
)

pytestmark = pytest.mark.row("upgrade")

VERSION = "0.32.0"
ENGINE = """
from typing import Literal

def plain(a, b=1):
    return ("plain", a, b)

Kinds = Literal["x", "y"]

class Base:
    def method(self, a: int) -> tuple:
        return ("method", a)

    @staticmethod
    def static(a):
        return ("static", a)

    @classmethod
    def build(cls, a):
        return (cls.__name__, a)

class Derived(Base):
    pass

class OwnNew:
    def __new__(cls, a):
        return super().__new__(cls)
"""
PLUGIN = """
from typing import Literal

def note(original, *args, **kwargs):
    return ("noted", original(*args, **kwargs))

def widen(original):
    return Literal[original, "z"]

def new(original, cls, *args, **kwargs):
    made = original(cls)
    made.noted = (args, kwargs)
    return made
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = {}
    for name, source in (("fake_engine", ENGINE), ("fake_plugin", PLUGIN)):
        made[name] = ModuleType(name)
        exec(source, made[name].__dict__)
        monkeypatch.setitem(sys.modules, name, made[name])
    return made["fake_engine"]


def row(
    attribute: str, expected: str, replacement: str | None = "fake_plugin:note", **changed: Any
) -> Patch:
    return Patch("fake_engine", attribute, expected, replacement, "a test", **changed)


PLAIN = row("plain", "(a, b=1)")


def test_wraps_a_function_of_a_module(engine: Any) -> None:
    apply([PLAIN], VERSION)
    assert engine.plain(1, b=2) == ("noted", ("plain", 1, 2))
    assert engine.plain.__name__ == "plain"


def test_wraps_a_method(engine: Any) -> None:
    apply([row("Base.method", "(self, a)")], VERSION)
    assert engine.Derived().method(3) == ("noted", ("method", 3))


def test_wraps_a_static_method(engine: Any) -> None:
    apply([row("Base.static", "(a)")], VERSION)
    assert engine.Base.static(1) == ("noted", ("static", 1))
    assert engine.Derived().static(1) == ("noted", ("static", 1))


def test_wraps_a_class_method_and_passes_the_class_it_was_called_on(engine: Any) -> None:
    apply([row("Base.build", "(a)")], VERSION)
    assert engine.Base.build(1) == ("noted", ("Base", 1))
    assert engine.Derived.build(1) == ("noted", ("Derived", 1))
    assert engine.Derived().build(1) == ("noted", ("Derived", 1))


def test_gives_a_class_a_new(engine: Any) -> None:
    apply([row("Base.__new__", ABSENT, "fake_plugin:new")], VERSION)
    assert type(engine.Derived()) is engine.Derived
    assert engine.Base().noted == ((), {})


def test_absent_is_not_found_where_a_class_has_its_own_new(engine: Any) -> None:
    with pytest.raises(PatchError, match=r"OwnNew\.__new__: expected absent, found \(cls, a\)"):
        apply([row("OwnNew.__new__", ABSENT, "fake_plugin:new")], VERSION)


def test_widens_a_literal(engine: Any) -> None:
    rows = [row("Kinds", "Literal", "fake_plugin:widen")]
    apply(rows, VERSION)
    apply(rows, VERSION)
    assert get_args(engine.Kinds) == ("x", "y", "z")


class Table:
    kind = "tokens"

    def __init__(self) -> None:
        """Fields that only instances have, one of them annotated, one in a branch."""
        self.ids: list[int] = []
        if self.ids:
            self.seldom, other = 1, 2
            self.ids[0] = other

    @property
    def length(self) -> int:
        return len(self.ids)

    def later(self) -> None:
        self.not_at_once = 1


class Wider(Table):
    def __init__(self) -> None:
        super().__init__()
        self.width = 1


@dataclasses.dataclass
class Record:
    first: int
    second: int = 2


class NoInit:
    name: str


@pytest.mark.parametrize(
    ("made_by", "asked", "has"),
    [
        (Table, "ids, seldom, length, kind", "ids, seldom, length, kind"),
        (Table, "ids, other, not_at_once, width", "ids"),
        (Wider, "width, ids, gone", "width, ids"),
        (Record, "second, first, third", "second, first"),
        (NoInit, "name, gone", "name"),
        (NoInit, "gone", ""),
    ],
)
def test_what_instances_have_is_known_without_making_one(
    engine: Any, made_by: type, asked: str, has: str
) -> None:
    engine.Made = made_by
    usable, found = state(row("Made", ATTRIBUTES + asked, None), VERSION)
    assert found == ATTRIBUTES + has
    assert usable == (asked == has)


def test_attributes_of_a_class_without_source_are_not_vouched_for(engine: Any) -> None:
    exec("class Made:\n    def __init__(self):\n        self.ids = []", vars(engine))
    usable, _ = state(row("Made", ATTRIBUTES + "ids", None), VERSION)
    assert not usable


def test_applying_twice_wraps_once(engine: Any) -> None:
    rows = [
        PLAIN,
        row("Base.method", "(self, a)"),
        row("Base.static", "(a)"),
        row("Base.build", "(a)"),
        row("Base.__new__", ABSENT, "fake_plugin:new"),
    ]
    apply(rows, VERSION)
    apply(rows, VERSION)
    apply_unchecked(rows)
    assert engine.plain(1) == ("noted", ("plain", 1, 1))
    assert engine.Base().method(1) == ("noted", ("method", 1))
    assert engine.Base.static(1) == ("noted", ("static", 1))
    assert engine.Derived.build(1) == ("noted", ("Derived", 1))
    assert [state(r, VERSION) for r in rows] == [(True, "patched")] * len(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (row("gone", "(a)"), ["fake_engine.gone", "expected (a)", "missing", "no attribute gone"]),
        (row("Gone.method", "(a)"), ["fake_engine.Gone.method", "missing", "Gone"]),
        (row("plain", "(a)"), ["fake_engine.plain", "expected (a)", "found (a, b=1)"]),
        (row("plain", "(a, b=2)"), ["found (a, b=1)"]),
        (row("Kinds", "(a)"), ["fake_engine.Kinds", "found Literal"]),
        (row("__doc__", "(a)"), ["fake_engine.__doc__", "found None"]),
        (row("plain", "(a, b=1)", versions=">=0.33"), ["release 0.32.0 is not >=0.33"]),
        (Patch("no_such_engine", "x", "(a)", None, "a test"), ["no_such_engine.x", "missing"]),
    ],
)
def test_one_wrong_row_replaces_nothing(engine: Any, wrong: Patch, words: list[str]) -> None:
    before = dict(vars(engine))
    with pytest.raises(PatchError) as caught:
        apply([PLAIN, wrong], VERSION)
    for word in [*words, "vLLM 0.32.0"]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {name: vars(engine)[name] for name in before} == before


def test_every_wrong_row_is_named(engine: Any) -> None:
    with pytest.raises(PatchError, match=r"fake_engine\.one.*fake_engine\.two"):
        apply([row("one", "(a)"), row("two", "(a)")], VERSION)


@pytest.mark.parametrize("missing", ["fake_plugin:gone", "no_such_plugin:note"])
def test_a_missing_replacement_replaces_nothing(engine: Any, missing: str) -> None:
    before = engine.plain
    with pytest.raises(PatchError, match=r"gone|no_such_plugin"):
        apply([PLAIN, row("Base.static", "(a)", missing)], VERSION)
    assert engine.plain is before


@pytest.mark.parametrize("version", ["0.28.9", "0.34.0", "1.0", "main", "0.1.dev1+gabcdef"])
def test_other_releases_are_not_usable(engine: Any, version: str) -> None:
    usable, found = state(PLAIN, version)
    assert not usable
    assert version in found


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post1", "0.33.0rc1", "0.33.2+cu129"])
def test_supported_releases_and_builds_of_them_are_usable(engine: Any, version: str) -> None:
    assert state(PLAIN, version) == (True, "(a, b=1)")


def test_a_row_that_is_only_used_is_checked_and_left_alone(engine: Any) -> None:
    before = engine.plain
    apply([row("plain", "(a, b=1)", None)], VERSION)
    apply_unchecked([row("plain", "(a)", None)])
    assert engine.plain is before
    with pytest.raises(PatchError, match="found"):
        apply([row("plain", "(a)", None)], VERSION)


def test_unchecked_replaces_what_is_there_whatever_its_shape(engine: Any) -> None:
    apply_unchecked([row("gone", "(a)"), row("Gone.x", "(a)"), row("plain", "(z)")])
    assert engine.plain(1) == ("noted", ("plain", 1, 1))


def test_a_description_leaves_out_annotations() -> None:
    def described(a: int, *b: str, c: float = 1.0, **d: bool) -> None: ...

    assert describe(described) == "(a, *b, c=1.0, **d)"
    assert describe(Literal["x"]) == "Literal"


def test_a_row_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.why = "another"  # type: ignore[misc]


def test_the_module_imports_no_vllm() -> None:
    assert not any(name.startswith("vllm.") for name in vars(patching))
