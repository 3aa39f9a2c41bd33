"""Counts which accepted drafts came from the heads and which from the request's own text.

vLLM's metrics count accepted drafts by position; where they came from only the drafter knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

logger = logging.getLogger(__name__)

_LOG_SECONDS = 30.0  # between two lines in the log


class Tally:
    """Accepted drafts by origin since the start; logged now and then while they grow."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.from_heads = 0
        self.from_context = 0
        self._drafted: dict[str, list[bool]] = {}
        self._logged_at = time.monotonic()
        self._logged = 0

    def note_drafts(self, request_id: str, from_context: list[bool]) -> None:
        """Remember where the drafts that go under verification came from."""
        self._drafted[request_id] = from_context

    def count_accepted(self, request_ids: Sequence[str], sampled: Sequence[list[int]]) -> None:
        """Count what verification accepted: each request sampled its accepted drafts and one more.

        Forgets all drafts: those of a request that is not in this batch are stale.
        """
        for request_id, tokens in zip(request_ids, sampled, strict=False):
            accepted = self._drafted.get(request_id, ())[: max(len(tokens) - 1, 0)]
            self.from_context += sum(accepted)
            self.from_heads += len(accepted) - sum(accepted)
        self._drafted.clear()
        self._log()

    def _log(self) -> None:
        if time.monotonic() - self._logged_at < _LOG_SECONDS:
            return
        self._logged_at = time.monotonic()
        total = self.from_heads + self.from_context
        if total > self._logged:
            self._logged = total
            logger.info(
                "bpd: %d drafts accepted: %d from the heads, %d from the requests' own text",
                total,
                self.from_heads,
                self.from_context,
            )
