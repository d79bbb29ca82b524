"""A step of set-up that may take for ever: a thread does it, and is left behind if need be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Step:
    """Work of set-up in a thread of its own. What it gives once nobody waits for it any more is undone."""

    def __init__(self, work: Callable[[], Any], undo: Callable[[Any], object] | None) -> None:
        self.given: Any = None
        self.failure: BaseException | None = None
        self._work = work
        self._undo = undo
        self._left = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do it."""
        try:
            given = self._work()
        except BaseException as error:  # sys.exit in code of the user's, too
            self.failure = error.with_traceback(None)
            return
        with self._lock:
            self.given = given
            left = self._left
        if left and self._undo is not None:
            self._undo(given)

    def leave(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._left = True
            given = self.given
        if given is not None and self._undo is not None:
            self._undo(given)
