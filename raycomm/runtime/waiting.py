"""`raycomm.wait`: which of several results are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from raycomm.channel import Deadline
from raycomm.observe.notice import Notice
from raycomm.runtime.refs import PENDING, Ref

_LOOK_S = 0.2  # how often it is looked whether results that nobody waits for stand in the way
_NAMED = 5  # pending refs that a log line names
_TURN_S = 0.005  # several graphs are waited for in turns: each has a doorbell of its own


def wait(refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
    """Wait until `num_returns` of `refs` are done, as `ray.wait` does for object refs. Fetches nothing.

    A ref is done when `ref.get()` would not wait for an actor, also when it would raise because its graph has ended. `refs` may
    belong to several graphs.

    Args:
        refs: of this process, each once.
        num_returns: from 1 to `len(refs)`.
        timeout: seconds; None or -1: no limit, 0: one look.

    Returns:
        (done, pending), each in the order of `refs`; `done` has `num_returns` refs, after the limit perhaps fewer. `pending` has
        all others, done or not.

    Raises:
        TypeError: something else than a list of refs. ValueError: a ref twice, `num_returns` out of range. ArgumentError: no time
            limit.
    """
    if not isinstance(refs, Iterable):
        raise TypeError(f"raycomm.wait takes a list of refs, got a single {type(refs).__name__}; write raycomm.wait([ref])")
    refs = list(refs)
    for ref in refs:
        if not isinstance(ref, Ref):
            raise TypeError(_no_ref(ref))
    if len(set(map(id, refs))) < len(refs):
        # It would be done and pending at once. Also Ray's rule.
        raise ValueError(
            "raycomm.wait takes each ref once, and one is given twice; give it once (a node that stands twice among the outputs "
            "has one ref for both)"
        )
    if not 1 <= num_returns <= len(refs):
        raise ValueError(f"num_returns={num_returns} must lie between 1 and the number of refs, {len(refs)}")
    deadline, notice = Deadline(timeout, "raycomm.wait"), Notice()
    while True:
        pending = [ref for ref in refs if not ref.done()]
        missing = num_returns - (len(refs) - len(pending))
        if missing <= 0 or deadline.over:
            break
        notice.give(partial(_waits, pending[:_NAMED]))
        graphs = {id(ref._graph): ref._graph for ref in pending}
        for graph in graphs.values():
            results = [(ref._queue.reader, ref._index) for ref in pending if ref._graph is graph and ref._value is PENDING]
            wanted, turn_s = (missing, _LOOK_S) if len(graphs) == 1 else (1, _TURN_S)
            graph._arena.core.wait_results(results, min(wanted, len(results)), deadline.left(at_most=turn_s))
    ready = [index for index, ref in enumerate(refs) if ref.done()][:num_returns]
    chosen = set(ready)
    return [refs[index] for index in ready], [ref for index, ref in enumerate(refs) if index not in chosen]


def _no_ref(value: object) -> str:
    kind = type(value).__qualname__
    # By name: this module knows nothing of Ray's graphs. Under `install` refs have Ray's names.
    if kind in ("CompiledDAGRef", "CompiledDAGFuture"):
        return (
            f"raycomm.wait takes refs of graphs that raycomm.compile made, got a {kind} of one that experimental_compile made; "
            "those are fetched one by one (ray.get with a timeout, or await), or compile the graph with raycomm.compile"
        )
    return f"raycomm.wait takes refs of compiled graphs, got {kind}; use ray.wait for Ray's object refs"


def _waits(pending: Sequence[Ref]) -> str:
    return f"raycomm.wait: {'; '.join(ref._graph.reports.get_waits(ref._index, ref._queue.channel) for ref in pending)}"
