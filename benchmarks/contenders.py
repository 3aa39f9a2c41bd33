"""Who is measured against whom by `make bench`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_bpd.errors import read_json

PLAIN = "no speculation"


@dataclass(frozen=True)
class Contender:
    """One way to serve the same target."""

    name: str
    speculative: dict[str, Any] | None  # --speculative-config
    package: str | None = None  # has to be installed, or the contender is left out

    @property
    def missing(self) -> str | None:
        """Why it cannot take part here, or None."""
        if self.package is None or importlib.util.find_spec(self.package):
            return None
        return f"{self.name}: left out, {self.package} is not installed"


def contenders(heads: str | None, tuned: Path | None) -> list[Contender]:
    """No speculation, vLLM's drafters that need no second model, and `bpd` with each option.

    `heads`: folder or hub id, None for those found for the target. `tuned`: what `vllm-bpd tune`
    wrote, None leaves that contender out.
    """
    bpd = {"method": "bpd", **({"model": heads} if heads else {})}
    found = [
        Contender(PLAIN, None),
        Contender(
            "ngram",
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 5,
            },
        ),
        # Without its memory of other requests' answers: the rounds here repeat no prompt, but
        # levels of concurrency do, and it would recite what it heard before.
        Contender(
            "suffix",
            {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
            "arctic_inference",
        ),
        Contender("bpd, heads alone", {**bpd, "context_lookup": False}),
        Contender("bpd", bpd),
    ]
    if tuned is not None:
        config = read_json(tuned, "a speculative config")
        found.append(Contender("bpd, tuned", {**bpd, **config}))
    return found
