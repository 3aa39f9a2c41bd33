"""A fault of vLLM's that a test expects, and nothing else that may go wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KnownFaultError(Exception):
    """The very fault that the test's mark names; all else fails the test."""


@contextmanager
def known_fault(words: str) -> Iterator[None]:
    """Turn an AssertionError that quotes an engine's trace with these words into the fault."""
    try:
        yield
    except AssertionError as error:
        if words not in str(error):
            raise
        raise KnownFaultError(words) from error
