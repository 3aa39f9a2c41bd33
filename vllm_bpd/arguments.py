"""Types of command-line options that are checked before anything long begins.

Each takes an option's text and raises argparse's error, one line that names the option, what was
found and what was expected.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_bpd.errors import HeadsError, shown


def output_file(text: str) -> Path:
    """A file that can be written at the end; the folders above it are made now."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"found {shown(text)}, a folder; expected a file to write")
    output_folder(str(path.parent))
    return path


def output_folder(text: str) -> Path:
    """A folder that can be written into; it is made now."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"found {shown(text)}, which cannot be a folder ({error.strerror}); expected a folder "
            "that is there or can be made"
        ) from None
    return Path(text)


def at_least_one(text: str) -> int:
    """An integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {shown(text)}; expected 1 or more")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"found {shown(text)}; expected a number above 0")
    return number


def run_command(main: Callable[[], None]) -> None:
    """Call `main`; a user's mistake, and an interruption, end it with one line."""
    try:
        main()
    except HeadsError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
