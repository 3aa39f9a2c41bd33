"""Options of a dataclass: read from recipes and from the command line, checked alike.

Fields are `Annotated[type, help]`. The type is str, int, float, bool, Path, a `Literal` of
strings, a tuple of one of these (`tuple[Path, ...]`), or one of these or None.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vllm_bpd.errors import HeadsError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Option:
    """One field of a dataclass, as a user sees it."""

    name: str
    kind: Any  # the type without its help and without None
    optional: bool  # None may be given
    help: str
    default: Any  # MISSING where there is none

    @property
    def many(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    def expected(self) -> str:
        """What may be given, in words."""
        if self.many:
            return f"a list, each {_expected(get_args(self.kind)[0])}"
        return _expected(self.kind) + (" or null" if self.optional else "")

    def convert(self, value: Any) -> Any:
        """`value`, as a YAML file has it, as the field's type.

        Raises HeadsError naming the field, what was found and what was expected.
        """
        if value is None and self.optional:
            return None
        try:
            if not self.many:
                return _convert(self.kind, value)
            if not isinstance(value, list):
                raise ValueError
            return tuple(_convert(get_args(self.kind)[0], one) for one in value)
        except ValueError:
            found = "nothing" if value is None else repr(value)
            raise HeadsError(
                f"{self.name}: found {found}; expected {self.expected()} ({self.help})"
            ) from None


def options_of(record: type, skip: Sequence[str] = ()) -> list[Option]:
    """The options of the dataclass `record`, in order, without the fields named in `skip`."""
    hints = get_type_hints(record, include_extras=True)
    return [_option(field, hints[field.name]) for field in fields(record) if field.name not in skip]


def _option(field: Field[Any], hint: Any) -> Option:
    assert get_origin(hint) is Annotated, f"{field.name}: give it a help: Annotated[type, help]"
    kind, text = get_args(hint)[:2]
    optional = get_origin(kind) in (Union, types.UnionType)
    if optional:
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    return Option(field.name, kind, optional, text, field.default)


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return "a path" if kind is Path else _WORDS[kind]


def _convert(kind: Any, value: Any) -> Any:
    """Raises ValueError for anything that is not plainly of the kind."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError
        return value
    if kind is Path:
        if not isinstance(value, str) or not value:
            raise ValueError
        return Path(value).expanduser()
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        return float(value)  # YAML reads 2e-3 as text, since it has no dot
    if type(value) is not kind:
        raise ValueError
    return value


def add_flags(parser: argparse.ArgumentParser, options: Sequence[Option], title: str) -> None:
    """One flag for each option, in a group of that title; flags not given leave no trace.

    Give options of one name once: its flag sets the field of every record that has it.
    """
    group = parser.add_argument_group(title)
    for option in options:
        default = "" if option.default in (MISSING, None, ()) else f" (default: {option.default})"
        given: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": (option.help + default).replace("%", "%%"),
        }
        kind = get_args(option.kind)[0] if option.many else option.kind
        if kind is bool:
            given["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            given["choices"] = get_args(kind)
        else:
            given |= {"type": kind, "metavar": kind.__name__.upper()}
        if option.many:
            given["nargs"] = "+"
        group.add_argument(option.flag, **given)
