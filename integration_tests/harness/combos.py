"""The combinations of vLLM release and model runner that the plugin must serve."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Combo:
    """A vLLM release (`major.minor`) and the model runner to force on it."""

    release: str
    runner: str

    @property
    def name(self) -> str:
        """The name used in test ids, as `0.32-V1`."""
        return f"{self.release}-{self.runner}"


# The installed release first, then the newest, then the oldest: what Ray 2.60's LLM libraries pin.
RELEASES = ("0.32", "0.33", "0.29")
COMBOS = tuple(Combo(release, runner) for release in RELEASES for runner in ("V1", "V2"))
