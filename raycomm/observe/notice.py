"""Says in the log who waits for whom, before any limit passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("raycomm")

FIRST_NOTICE_S = 10.0
NEXT_NOTICE_S = 60.0


class Notice:
    """Of one wait: due after 10 s, then each minute.

    Args:
        first_s: seconds until the first one instead.
    """

    def __init__(self, first_s: float | None = None) -> None:
        self._begin = time.monotonic()
        self._next = self._begin + (FIRST_NOTICE_S if first_s is None else first_s)

    def left(self) -> float:
        """Seconds until the next notice is due."""
        return max(0.0, self._next - time.monotonic())

    def give(self, text: Callable[[], str]) -> None:
        """Log a text if a notice is due."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_NOTICE_S
            logger.warning("waiting for %.0f s: %s", now - self._begin, text())
