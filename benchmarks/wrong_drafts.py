"""A drafter that costs nothing and is always wrong: to time verification by itself."""

from __future__ import annotations

from typing import Any

_WRONG = 1  # a token id that no answer holds


class WrongDrafts:
    """vLLM's `custom_class` drafter: `count` wrong drafts for every request that sampled."""

    count = 0  # set between runs; the engine runs in this process

    def __init__(self, vllm_config: Any) -> None:
        """Nothing is needed of the config."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """The drafts of one step."""
        return [[_WRONG] * self.count if tokens else [] for tokens in sampled]
