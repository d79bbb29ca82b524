"""Whether the Ray that a graph was compiled under is still there, in this process."""

from __future__ import annotations

import ray


class RayConnection:
    """This process's connection to Ray, from one `ray.init` to the next `ray.shutdown`.

    Looked at only where something has ended already, or is shown: the hot path does not ask.
    """

    def __init__(self) -> None:
        self._identity = _identity()
        self._closing = False
        self._ended: bool | None = None

    def close(self) -> None:
        """`ray.shutdown` has begun."""
        self._closing = True

    def graph_ends(self) -> None:
        """The graph ends now: what Ray does later is not the reason."""
        if self._ended is None:
            self._ended = self._closing or not ray.is_initialized()

    @property
    def closed(self) -> bool:
        """Whether `ray.shutdown` was called before the graph ended, also if `ray.init` was called again since."""
        if self._ended is not None:
            return self._ended
        try:
            return self._closing or not ray.is_initialized() or _identity() != self._identity
        except Exception:  # it goes in this moment
            return True


def _identity() -> tuple[str, str]:
    # Not the worker id: a driver's is made from its job id, and the first job of every cluster has the same one.
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()
