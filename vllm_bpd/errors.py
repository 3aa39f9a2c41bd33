"""The one error type for what a user can put right, and what its lines are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_SHOWN = 200  # characters of a value


class HeadsError(Exception):
    """Bad heads, config or option: one line with field, found, expected and what to do.

    Not a ValueError: pydantic, which builds vLLM's configs, turns those into several lines of
    its own.
    """


def shown(value: object) -> str:
    """`value` as it stands in an error's line: short, whatever it is.

    Python itself refuses to write integers of more than 4300 digits, and what is nested too deeply.
    """
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in the file at `path`, which should be readable as `what`.

    Raises HeadsError, one line that names the file, for anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise HeadsError(f"{path}: not readable as {what} (nested too deeply)") from None
    # No JSON and no UTF-8 are ValueErrors, and so is an integer of more than 4300 digits.
    except (OSError, ValueError) as error:
        raise HeadsError(f"{path}: not readable as {what} ({error})") from None
    if not isinstance(values, dict):
        raise HeadsError(f"{path}: found {type(values).__name__}; expected a JSON object")
    return values


def read_json_lines(path: Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of the JSONL file at `path`, each behind its place, FILE:LINE.

    Empty lines are passed over. Raises HeadsError, one line that names the place, for a file that
    is not readable as `what`, and for a line that is no JSON object.
    """
    try:
        # Not splitlines(): in a JSON text the other ends of lines that Unicode has may stand.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise HeadsError(f"{path}: not readable as {what} ({error})") from None
    objects = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values = json.loads(line)
        except RecursionError:
            raise HeadsError(f"{where}: nested too deeply; expected a plain object") from None
        except ValueError as error:
            raise HeadsError(f"{where}: not JSON ({error}); expected one object a line") from None
        if not isinstance(values, dict):
            raise HeadsError(f"{where}: found {type(values).__name__}; expected a JSON object")
        objects.append((where, values))
    return objects


def named(name: str) -> str:
    """A name out of a file as it stands in an error's line: plain, unless it would break it."""
    return name if name and name.isprintable() and len(name) <= _MOST_SHOWN else shown(name)
