"""The one error type for what a user can put right. Imports nothing."""


class HeadsError(Exception):
    """Bad heads, config or option: one line with field, found, expected and what to do.

    Not a ValueError: pydantic, which builds vLLM's configs, turns those into several lines of
    its own.
    """
