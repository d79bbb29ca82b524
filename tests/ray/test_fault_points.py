"""An actor that ends at any point of a graph's life: whoever waits is told who it was, and everybody else is free."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import ActorDiedError, CompileError, InputNode, bind
from raycomm.testing import Action, Exit, ExitActor, Fault, Kill, Point, Raise, Sleep, Stall, inject
from tests.ray.workers import PATIENCE_S, Worker, free, start, until

pytestmark = pytest.mark.usefixtures("cluster")

_HANG_S = 20.0  # two seconds are promised
_IN_A_LOOP = [
    Point.BEFORE_READ,
    Point.AFTER_READ,
    Point.BEFORE_CALL,
    Point.AFTER_CALL,
    Point.BEFORE_WRITE,
    Point.AFTER_WRITE,
]
_IN_SETUP = [Point.SETUP_BEGIN, Point.SETUP_ARENA, Point.SETUP_LINKS, Point.SETUP_READY]
_WAYS = ["Kill", "Exit", "ray.kill"]


class Victims:
    """Actors to end; the next is started while the test with the last one runs."""

    def __init__(self) -> None:
        self._next = self._make()

    def _make(self) -> Any:
        return Worker.options(max_restarts=1).remote("victim")

    def take(self) -> tuple[Any, int]:
        """A running actor, and its process id."""
        taken, self._next = self._next, self._make()
        return taken, ray.get(taken.pid.remote())


@pytest.fixture(scope="module")
def victims(cluster: None) -> Victims:
    return Victims()


@pytest.fixture(scope="module")
def ends(cluster: None) -> list[Any]:
    """The first and the last actor of every pipeline here: they survive all tests of this module."""
    return start(2)


def pipeline(ends: list[Any], middle: Any) -> Any:
    """input -> first.add -> middle.add -> last.add: three is added."""
    with InputNode() as x:
        return bind(ends[1].add, bind(middle.add, bind(ends[0].add, x)))


def action_of(how: str, stall: Stall) -> Action:
    return {"Kill": Kill(), "Exit": Exit(3), "ExitActor": ExitActor(), "ray.kill": stall}[how]


def kill_at(stall: Stall, victim: Any) -> threading.Thread:
    """Kills the actor, which may restart, once it is at the stall; without waiting for that."""

    def work() -> None:
        stall.wait_reached()
        ray.kill(victim, no_restart=False)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def restarted(victim: Any, pid: int) -> None:
    """Returns once the actor runs in another process."""

    def runs() -> bool:
        try:
            return bool(ray.get(victim.pid.remote(), timeout=PATIENCE_S) != pid)
        except ray.exceptions.RayActorError:  # not yet
            return False

    until(runs, "the actor restarts")


def check(error: Any, graph: Any, victim: Any, pid: int) -> None:
    assert isinstance(error, ActorDiedError)
    assert isinstance(error, ray.exceptions.ActorDiedError)
    label = graph.plan.processes[2].label
    assert (error.graph, error.actor, error.pid, error.actor_id) == (graph.name, label, pid, victim._actor_id.hex())
    assert f"{label} (pid {pid})" in str(error)


@pytest.mark.parametrize("how", _WAYS)
@pytest.mark.parametrize("point", _IN_A_LOOP)
def test_an_actor_ends_in_its_loop(victims: Victims, ends: list[Any], stall: Stall, point: Point, how: str) -> None:
    victim, pid = victims.take()
    with inject(Fault(actor=victim, point=point, execution=2, action=action_of(how, stall))):
        graph = raycomm.compile(pipeline(ends, victim))
    first = graph.execute(0)
    assert first.get(timeout=PATIENCE_S) == 3
    begin = time.monotonic()
    if how == "ray.kill":
        killer = kill_at(stall, victim)
    refs: list[Any] = []
    told: list[Any] = []
    for value in range(1, 6):
        try:
            refs.append(graph.execute(value, timeout=PATIENCE_S))
        except ActorDiedError as error:  # it was known already
            told.append(error)
    for execution, ref in enumerate(refs, 1):
        try:
            got = ref.get(timeout=PATIENCE_S)
        except ActorDiedError as error:
            told.append(error)
            assert error.execution == execution
            with pytest.raises(ActorDiedError):
                ref.get(timeout=0)
        else:
            # The last that may have passed the victim is the one it had written.
            assert got == execution + 3
            assert execution == 1 or (execution, point) == (2, Point.AFTER_WRITE)
    assert time.monotonic() - begin < _HANG_S
    assert len(told) >= 3
    with pytest.raises(ActorDiedError) as caught:
        graph.execute(9)
    for error in (*told, caught.value):
        check(error, graph, victim, pid)
        # Before it reads, its last call is the one of the execution before, if it has one at all.
        assert error.node == f"{error.actor}.add#1" or (error.node is None and point is Point.BEFORE_READ)
    assert first.get() == 3
    if how == "ray.kill":
        killer.join()

    # The survivors answer, and go on in a new graph with the restarted actor, before the old one is torn down and after.
    assert ray.get([end.add.remote(1) for end in ends], timeout=_HANG_S) == [2, 2]
    restarted(victim, pid)
    with raycomm.compile(pipeline(ends, victim)) as again:
        assert again.execute(1).get(timeout=PATIENCE_S) == 4
        graph.teardown()
        assert again.execute(2).get(timeout=PATIENCE_S) == 5
    free(*ends, victim)
    ray.kill(victim)


@pytest.mark.parametrize("point", [Point.BEFORE_READ, Point.BEFORE_CALL, Point.AFTER_CALL, Point.AFTER_WRITE])
def test_an_actor_leaves_from_its_loop(victims: Victims, ends: list[Any], point: Point) -> None:
    """`exit_actor` is wanted, so the actor does not restart; a fresh one takes its place."""
    victim, pid = victims.take()
    with inject(Fault(actor=victim, point=point, execution=1, action=ExitActor())):
        graph = raycomm.compile(pipeline(ends, victim))
    begin = time.monotonic()
    refs = [graph.execute(value) for value in range(2)]
    with pytest.raises(ActorDiedError) as caught:
        for _ in range(1000):
            refs.append(graph.execute(2))
            refs[-1].get(timeout=PATIENCE_S)
    check(caught.value, graph, victim, pid)
    assert time.monotonic() - begin < _HANG_S
    with pytest.raises(ray.exceptions.ActorDiedError):
        while True:
            ray.get(victim.add.remote(1), timeout=PATIENCE_S)
    fresh, _ = victims.take()
    with raycomm.compile(pipeline(ends, fresh)) as again:
        assert again.execute(1).get(timeout=PATIENCE_S) == 4
    graph.teardown()
    free(*ends, fresh)
    ray.kill(fresh)


@pytest.mark.parametrize("how", _WAYS)
@pytest.mark.parametrize("point", _IN_SETUP)
def test_an_actor_ends_during_compile(victims: Victims, ends: list[Any], stall: Stall, point: Point, how: str) -> None:
    victim, pid = victims.take()
    if how == "ray.kill":
        killer = kill_at(stall, victim)
    begin = time.monotonic()
    with (
        inject(Fault(actor=victim, point=point, action=action_of(how, stall))),
        pytest.raises(ActorDiedError, match="died before it was set up") as caught,
    ):
        raycomm.compile(pipeline(ends, victim), name="ill-fated")
    assert time.monotonic() - begin < _HANG_S
    assert isinstance(caught.value, ray.exceptions.ActorDiedError)
    assert caught.value.graph == "ill-fated"
    assert caught.value.actor == "WorkerBody" or str(caught.value.actor).startswith("WorkerBody#")
    assert caught.value.actor_id == victim._actor_id.hex()
    if how == "ray.kill":
        killer.join()
    fresh, _ = victims.take()
    with raycomm.compile(pipeline(ends, fresh)) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 4
    restarted(victim, pid)
    with raycomm.compile(pipeline(ends, victim)) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 4
    free(*ends, fresh, victim)
    ray.kill(fresh)
    ray.kill(victim)


@pytest.mark.parametrize("how", _WAYS)
def test_an_actor_ends_during_teardown(victims: Victims, ends: list[Any], stall: Stall, how: str) -> None:
    victim, pid = victims.take()
    with inject(Fault(actor=victim, point=Point.LEAVING, action=action_of(how, stall))):
        graph = raycomm.compile(pipeline(ends, victim))
    assert graph.execute(1).get(timeout=PATIENCE_S) == 4
    if how == "ray.kill":
        killer = kill_at(stall, victim)
    begin = time.monotonic()
    graph.teardown()
    assert time.monotonic() - begin < _HANG_S
    if how == "ray.kill":
        killer.join()
    restarted(victim, pid)
    with raycomm.compile(pipeline(ends, victim)) as again:
        assert again.execute(1).get(timeout=PATIENCE_S) == 4
    free(*ends, victim)
    ray.kill(victim)


def test_a_loop_that_never_began_leaves_nothing(victims: Victims, ends: list[Any], stall: Stall) -> None:
    """Its graph is closed while it gets ready; its memory is given back at once, not at some garbage collection."""
    victim, _ = victims.take()
    late = ends[0]
    ray.get(late.__ray_call__.remote(lambda _: gc.disable()))
    try:
        killer = kill_at(stall, victim)  # not before: `late` may leave at any point of its setup once the graph is closed
        with inject(Fault(actor=late, point=Point.SETUP_READY, action=stall)), pytest.raises(ActorDiedError):
            raycomm.compile(pipeline(ends, victim))
        killer.join()
        stall.release()
        free(late)
    finally:
        ray.get(late.__ray_call__.remote(lambda _: gc.enable()))
    ray.kill(victim)


class KillsInPassing:
    """Kills a process while it is being sent, and arrives as the number 5."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        import os
        import signal

        import psutil

        os.kill(self.pid, signal.SIGKILL)
        until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE if psutil.pid_exists(self.pid) else True, "end")
        return int, ("5",)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_actor_ends_while_the_driver_writes(victims: Victims, ends: list[Any], who: int) -> None:
    """The first actor, which reads what is being written, one behind it, and the one that writes to the driver."""
    chain = [victims.take() for _ in range(3)]
    workers = [worker for worker, _ in chain]
    with InputNode() as x:
        out = bind(workers[2].add, bind(workers[1].add, bind(workers[0].add, x)))
    graph = raycomm.compile(out)
    assert graph.execute(1).get(timeout=PATIENCE_S) == 4
    begin = time.monotonic()
    with pytest.raises(ActorDiedError) as caught:
        graph.execute(KillsInPassing(chain[who][1])).get(timeout=PATIENCE_S)
    assert time.monotonic() - begin < _HANG_S
    assert (caught.value.pid, caught.value.actor_id) == (chain[who][1], workers[who]._actor_id.hex())
    graph.teardown()
    others = [worker for place, worker in enumerate(workers) if place != who]
    with raycomm.compile(pipeline(others, ends[0])) as again:
        assert again.execute(1).get(timeout=PATIENCE_S) == 4
    free(*others)
    for worker in workers:
        ray.kill(worker)


# --- faults that end nobody ---


def test_what_a_call_raises_fails_its_execution_alone(ends: list[Any]) -> None:
    fault = Fault(actor=ends[0], point=Point.AFTER_CALL, execution=1, action=Raise(LookupError("lost")), method="add")
    with InputNode() as x:
        out = bind(ends[1].add, bind(ends[0].echo, bind(ends[0].add, x)))
    with inject(fault):
        graph = raycomm.compile(out)
    with graph:
        refs = [graph.execute(value) for value in range(3)]
        assert [refs[0].get(timeout=PATIENCE_S), refs[2].get(timeout=PATIENCE_S)] == [2, 4]
        with pytest.raises(LookupError, match="lost"):
            refs[1].get(timeout=PATIENCE_S)
    free(*ends)


def test_a_loop_that_fails_closes_the_graph_and_leaves_the_actor_alive(ends: list[Any]) -> None:
    with inject(Fault(actor=ends[0], point=Point.BEFORE_WRITE, execution=1, action=Raise(RuntimeError("broken")))):
        graph = raycomm.compile(pipeline(ends, start(1)[0]))
    assert graph.execute(1).get(timeout=PATIENCE_S) == 4
    with pytest.raises(ActorDiedError, match=rf"{graph.plan.processes[1].label} .*left its loop"):
        graph.execute(2).get(timeout=PATIENCE_S)
    free(*ends)
    graph.teardown()


def test_sleep_and_stall_only_delay(ends: list[Any], stall: Stall) -> None:
    faults = [
        Fault(actor=ends[0], point=Point.SETUP_READY, action=Sleep(0.01)),
        Fault(actor=ends[0], point=Point.BEFORE_READ, execution=2, action=Sleep(0.01)),
        Fault(actor=ends[1], point=Point.BEFORE_CALL, execution=1, action=stall),
    ]
    with InputNode() as x:
        out = bind(ends[1].add, bind(ends[0].add, x))
    with inject(*faults[:1]), inject(*faults[1:]):
        graph = raycomm.compile(out)
    with graph:
        refs = [graph.execute(value) for value in range(4)]
        stall.wait_reached()
        assert refs[0].get(timeout=PATIENCE_S) == 2
        with pytest.raises(raycomm.ChannelTimeoutError, match=r"computes .*add"):
            refs[1].get(timeout=0)
        stall.release()
        assert [ref.get(timeout=PATIENCE_S) for ref in refs] == [2, 3, 4, 5]
    with raycomm.compile(out) as graph:  # outside: no fault
        assert graph.execute(0).get(timeout=PATIENCE_S) == 2


def test_a_fault_for_an_actor_outside_the_graph_is_refused(ends: list[Any], victims: Victims) -> None:
    with InputNode() as x:
        out = bind(ends[1].add, bind(ends[0].add, x))
    for actor in (victims.take()[0], "Nobody", "WorkerBody"):
        with (
            inject(Fault(actor=actor, point=Point.BEFORE_READ, action=Kill())),
            pytest.raises(CompileError, match="fault at BEFORE_READ") as caught,
        ):
            raycomm.compile(out)
        assert "name one of: WorkerBody#" in str(caught.value)
    with pytest.raises(ValueError, match="belongs to no execution"):
        Fault(actor="A", point=Point.LEAVING, action=Kill(), execution=1)
    with pytest.raises(ValueError, match="belongs to no call"):
        Fault(actor="A", point=Point.BEFORE_READ, action=Kill(), method="add")
