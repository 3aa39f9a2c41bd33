"""The four combinations of vLLM release and model runner that the plugin must serve."""

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


COMBOS = tuple(Combo(release, runner) for release in ("0.32", "0.33") for runner in ("V1", "V2"))
