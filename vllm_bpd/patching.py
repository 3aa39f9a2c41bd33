"""Replaces symbols of another package, all or none. Imports no vLLM.

A `Patch` names a symbol, the shape we read in its source, and the function that wraps it. `apply`
looks at every symbol first; only if all are as expected is any replaced. Applying twice changes
nothing.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

ABSENT: Final = "absent"
ATTRIBUTES: Final = "instances have "  # and their names, comma and space between
_MARK = "__bpd_patch__"


@dataclass(frozen=True)
class Patch:
    """One symbol we touch."""

    module: str  # where it lives
    attribute: str  # "name" or "Class.name"
    expected: str  # what `state` finds: parameters, "Literal", ABSENT, or ATTRIBUTES and names
    replacement: str | None  # "module:function", called with the original first; None: only used
    why: str  # what it is for
    versions: str = ">=0.29,<0.34"  # releases where `expected` was read and tested

    @property
    def symbol(self) -> str:
        """Full dotted name."""
        return f"{self.module}.{self.attribute}"


class PatchError(Exception):
    """A touched symbol is not what we read: names symbol, expected, found and version."""


def describe(value: Any) -> str:
    """What a symbol looks like: `(a, b=1)` for a callable, `Literal` for a Literal of any values.

    Annotations are left out: they differ between two readings of one signature.
    """
    if value is ABSENT:
        return ABSENT
    if get_origin(value) is Literal:
        return "Literal" if get_args(value) else "empty Literal"
    value = getattr(value, "__wrapped__", value) if hasattr(value, _MARK) else value
    signature = inspect.signature(value)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def attributes_among(made_by: type, names: Iterable[str]) -> str:
    """Which of `names` instances of a class have: ATTRIBUTES and those, in the order given.

    Known from the class itself, its annotations (fields of a dataclass) and what any `__init__`
    assigns to `self`; nothing is built. Raises OSError where an `__init__` has no source.
    """
    known: set[str] = set()
    for owner in made_by.__mro__[:-1]:
        known |= vars(owner).keys() | vars(owner).get("__annotations__", {}).keys()
        if "__init__" in vars(owner) and not hasattr(owner, "__dataclass_fields__"):
            known |= _assigned_to_self(vars(owner)["__init__"])
    return ATTRIBUTES + ", ".join(name for name in names if name in known)


def _assigned_to_self(init: Callable[..., Any]) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def state(patch: Patch, version: str) -> tuple[bool, str]:
    """(usable, what was found) of one row on the installed `version` of the patched package."""
    if not is_release(version, patch.versions):
        return False, f"release {version} is not {patch.versions}"
    try:
        owner, name = _owner(patch)
    except (ImportError, AttributeError) as error:
        return False, f"missing ({error})"
    found = _lookup(owner, name)
    if hasattr(found, _MARK):
        return True, "patched"
    try:
        if patch.expected.startswith(ATTRIBUTES):
            shape = attributes_among(found, patch.expected.removeprefix(ATTRIBUTES).split(", "))
        else:
            shape = describe(found)
    except (TypeError, ValueError, OSError):
        shape = repr(found)
    return shape == patch.expected, shape


def apply(patches: Iterable[Patch], version: str) -> None:
    """Replace every symbol of `patches`, or, with PatchError, none of them."""
    rows = list(patches)
    wrong = []
    for patch in rows:
        usable, found = state(patch, version)
        if not usable:
            wrong.append(f"{patch.symbol}: expected {patch.expected}, found {found}")
    if wrong:
        raise PatchError(f"vLLM {version}: " + "; ".join(wrong))
    try:
        replacements = [(patch, _load(patch.replacement)) for patch in rows if patch.replacement]
    except (ImportError, AttributeError) as error:
        # Our own modules import more of vLLM than the rows name.
        raise PatchError(
            f"vLLM {version}: a part of it that is used is missing ({error})"
        ) from error
    for patch, replacement in replacements:
        _replace(patch, replacement)


def apply_unchecked(patches: Iterable[Patch]) -> None:
    """Replace what can be, whatever its shape: for replacements that only refuse or pass on."""
    for patch in patches:
        if patch.replacement:
            with contextlib.suppress(ImportError, AttributeError):
                _replace(patch, _load(patch.replacement))


def is_release(version: str, versions: str) -> bool:
    """Whether the release `version` is one of `versions`, pre-releases included."""
    try:
        return Version(version) in SpecifierSet(versions, prereleases=True)
    except InvalidVersion:  # a build of someone's own; nothing was read in its source
        return False


def _owner(patch: Patch) -> tuple[Any, str]:
    owner: Any = importlib.import_module(patch.module)
    *path, name = patch.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    if name != "__new__" and not hasattr(owner, name):
        raise AttributeError(f"no attribute {name}")
    return owner, name


def _lookup(owner: Any, name: str) -> Any:
    """The attribute, or ABSENT for a `__new__` that a class merely inherits."""
    if name == "__new__" and name not in vars(owner):
        return ABSENT
    return getattr(owner, name)


def _load(reference: str) -> Callable[..., Any]:
    module, name = reference.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _replace(patch: Patch, replacement: Callable[..., Any]) -> None:
    owner, name = _owner(patch)
    original = _lookup(owner, name)
    if hasattr(original, _MARK):
        return
    if get_origin(original) is Literal:
        setattr(owner, name, replacement(original))
        return
    kind = inspect.getattr_static(owner, name) if inspect.isclass(owner) else None
    if original is ABSENT:
        original = object.__new__
    elif isinstance(kind, classmethod):
        original = kind.__func__  # not bound, so that a subclass gets itself

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapper, _MARK, patch.symbol)
    if name == "__new__" or isinstance(kind, staticmethod):
        setattr(owner, name, staticmethod(wrapper))
    else:
        setattr(owner, name, classmethod(wrapper) if isinstance(kind, classmethod) else wrapper)
