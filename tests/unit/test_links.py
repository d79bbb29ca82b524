"""What an actor does when one of its links fails: in which order the graph is ended and links are aborted, by whatever thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raycomm import InputNode, MultiOutputNode, allreduce, bind
from raycomm.errors import CommunicatorError, PeerDiedError
from raycomm.graph.build import build
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Place
from raycomm.plan.transfer import Group, Link
from raycomm.runtime.links import Links
from tests.unit.stub_actors import actor

GUARD_S = 10.0


class End:
    """Like a communicator over NCCL: its abort asks first whether it may."""

    def __init__(self, links: Links, part: Link | Group, log: list[str]) -> None:
        self.name = str(part)
        self.device = SimpleNamespace(current_stream=lambda: "a stream")
        self.wrong: CommunicatorError | None = None
        self._links = links
        self._part = part
        self._log = log

    def poll(self) -> None:
        if self.wrong is not None:
            raise self.wrong

    def fail(self) -> None:
        self._links._fail(self._part, PeerDiedError(f"{self.name} failed"))
        self.abort(0.0)

    def abort(self, limit_s: float) -> None:
        self._links._fail(self._part, CommunicatorError("aborted"))
        self._log.append(f"abort {self.name}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def links(log: list[str]) -> Links:
    """Of B: A -> B -> C, B -> D, and a collective of B and C."""
    with InputNode() as x:
        made = bind(actor("A").forward, x).with_tensor_transport("nccl")
        passed = bind(actor("B").forward, made).with_tensor_transport("nccl")
        other = bind(actor("B").forward, made).with_tensor_transport("nccl")
        both = allreduce([bind(actor("B").forward, x), bind(actor("C").forward, passed)], communicator="nccl")
        node = MultiOutputNode([*both, bind(actor("D").forward, other)])
    graph = build(node)
    plan = lower(graph, "links")
    places = {process.index: Place.gpu("cuda:0", f"GPU-{process.index}") for process in plan.processes[1:]}
    plan = on_devices(plan, graph, places)
    here = next(process.index for process in plan.processes if process.label == "B")
    made_links = Links(plan, here, None)
    made_links._ends = {part: End(made_links, part, log) for part in made_links._mine}  # type: ignore[misc]
    assert len(made_links._ends) == 4
    return made_links


def the_end(links: Links, *, sends: bool) -> Any:
    return next(end for part, end in links._ends.items() if links._sends_on(part) is sends)


def test_what_is_received_on_is_aborted_after_the_graph_and_all_that_is_sent_on(links: Links, log: list[str]) -> None:
    links._end = lambda error: log.append(f"end: {error}")
    incoming = the_end(links, sends=False)
    incoming.fail()
    assert log[0] == f"end: {incoming.name} failed"
    assert log[-1] == f"abort {incoming.name}"
    assert sorted(log[1:-1]) == sorted(f"abort {end.name}" for end in links._ends.values() if end.name != incoming.name)
    links.close()
    assert log.count(f"end: {incoming.name} failed") == 1


def test_who_fails_second_waits_for_the_first(links: Links, log: list[str]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def end(error: CommunicatorError) -> None:
        begun.set()
        assert go_on.wait(GUARD_S)
        log.append("end")

    links._end = end
    sending, receiving = the_end(links, sends=True), the_end(links, sends=False)
    threads = [threading.Thread(target=sending.fail)]
    threads[0].start()
    assert begun.wait(GUARD_S)
    threads.append(threading.Thread(target=receiving.fail))
    threads[1].start()
    threads[1].join(0.1)
    assert log == []  # nothing is aborted before the graph has ended
    go_on.set()
    for thread in threads:
        thread.join(GUARD_S)
    assert log[0] == "end"
    assert log.index(f"abort {receiving.name}") > 0
    assert sum(entry == "end" for entry in log) == 1


@pytest.mark.parametrize("what", ["the graph has ended", "an end has failed", "looking fails"])
def test_the_watcher_aborts_whatever_goes_wrong(links: Links, log: list[str], what: str) -> None:
    """Nobody else would end a wait in the device's driver."""
    aborted = threading.Event()

    def look() -> None:
        if what == "the graph has ended":
            raise RuntimeError("closed")

    def late() -> tuple[float, str] | None:
        if what == "looking fails":
            raise KeyError(7)
        return None

    if what == "an end has failed":
        the_end(links, sends=True).wrong = PeerDiedError("gone")
    links.late = late
    with links.watched(look, lambda error: log.append("end")):
        until = threading.Event()
        for _ in range(100):
            if len(log) >= 5:
                aborted.set()
                break
            until.wait(0.1)
    assert aborted.is_set(), log
    assert log[0] == "end"
    assert {entry for entry in log if entry != "end"} == {f"abort {end.name}" for end in links._ends.values()}
