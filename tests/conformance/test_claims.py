"""Who comes first, the actor that begins an execution or the caller that cancels it, and that a forked child decides nothing."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from raycomm.channel import RingLayout, ShmArena
from raycomm.codec import Failure
from raycomm.errors import ExecutionCancelledError
from raycomm.options import Options

ROOT = Path(__file__).parents[2]
IN_FLIGHT = 4
PLACES = 8  # claims remembered at IN_FLIGHT; an execution takes the place of the one PLACES before it


class Graph:
    """The driver, process 0, which writes numbers, and an actor, process 1, which reads them as input; both in this process."""

    def __init__(self) -> None:
        options = Options(shm_limit_bytes=1 << 20, max_inflight=IN_FLIGHT)
        self.driver = ShmArena.create(0, [RingLayout(0, IN_FLIGHT, 256, (1,))], options, loops=2, processes=2)
        self.actor = ShmArena.create(1, [], options, loops=2)
        self.driver.attach(self.actor.address)
        self.actor.attach(self.driver.address)
        self.driver.join(0)
        self.actor.join(0)
        self.writer = self.driver.writer([0])
        self.reader = self.actor.reader(0, 0, 0, drain=True, claims=True)

    def execute(self, count: int = 1) -> None:
        for _ in range(count):
            self.writer.write(self.writer.published, 5)

    def cancel(self, execution: int) -> bool:
        return self.driver.core.cancel(execution)

    def begin(self) -> bool:
        """The actor takes the next input; False if that execution was cancelled."""
        execution = self.reader.taken
        value = self.reader.read(5)
        if isinstance(value, Failure):
            error = value.exception
            assert isinstance(error, ExecutionCancelledError)
            assert error.execution == execution
            return False
        assert value == execution
        return True

    def run(self, count: int) -> None:
        """Executions that nobody cancels."""
        for _ in range(count):
            self.execute()
            assert self.begin()


def test_the_first_claim_stays() -> None:
    graph = Graph()
    graph.execute(4)
    assert graph.cancel(1)
    assert graph.cancel(1), "twice is once"
    assert [graph.begin() for _ in range(3)] == [True, False, True]
    assert [graph.cancel(execution) for execution in range(4)] == [False, True, False, True]
    assert not graph.begin()


def test_an_attached_process_cancels_in_the_drivers_arena() -> None:
    graph = Graph()
    graph.execute(2)
    assert graph.actor.core.cancel(0)
    assert graph.cancel(0)
    assert [graph.begin(), graph.begin()] == [False, True]
    assert not graph.actor.core.cancel(1)


def test_without_claims_nothing_is_cancelled() -> None:
    options = Options(shm_limit_bytes=1 << 20)
    arena = ShmArena.create(0, [], options, loops=2)
    arena.join(0)
    assert not arena.core.cancel(0)


@pytest.mark.parametrize("begun", [True, False], ids=["begun before", "cancelled before"])
@pytest.mark.parametrize("later", ["waiting", "begun", "cancelled"])
def test_an_old_execution_whose_place_was_taken(begun: bool, later: str) -> None:
    """Its cancel is False, and whatever happened or will happen to the later one does."""
    graph = Graph()
    graph.execute()
    if not begun:
        assert graph.cancel(0)
    assert graph.begin() is begun
    graph.run(PLACES - 1)
    graph.execute()  # in the place of execution 0
    if later == "begun":
        assert graph.begin()
    elif later == "cancelled":
        assert graph.cancel(PLACES)
    for _ in range(2):
        # Until the later one is claimed the place still tells what became of the old one.
        assert graph.cancel(0) is (later == "waiting" and not begun)
    if later == "begun":
        assert not graph.cancel(PLACES)
    else:
        assert graph.begin() is (later == "waiting")
    graph.run(3 * PLACES)
    assert not any(graph.cancel(execution) for execution in range(PLACES, 4 * PLACES))


def test_random_cancels_agree_with_a_model(rng: random.Random) -> None:
    """`fate` says what has become of each execution; a cancel may be of any that was submitted, however long ago."""
    graph = Graph()
    fate: dict[int, str] = {}
    latest: dict[int, int] = {}  # by place: the last execution that was claimed there

    def decide(execution: int, wish: str) -> bool:
        if latest.get(execution % PLACES, -1) > execution:
            return False
        latest[execution % PLACES] = execution
        return fate.setdefault(execution, wish) == wish

    cancelled = refused = 0
    for _ in range(20_000):
        submitted, taken = graph.writer.published, graph.reader.taken
        step = rng.random()
        if step < 0.3:
            if submitted - taken < IN_FLIGHT:
                graph.execute()
        elif step < 0.6:
            if taken < submitted:
                assert graph.begin() is decide(taken, "begun"), taken
        elif submitted:
            back = rng.choice((1, IN_FLIGHT, PLACES, 3 * PLACES))
            execution = max(0, submitted - rng.randint(1, back))
            got = graph.cancel(execution)
            assert got is decide(execution, "cancelled"), (execution, fate.get(execution))
            cancelled += got
            refused += not got
    assert min(cancelled, refused) > 100
    assert set(fate.values()) == {"begun", "cancelled"}


def test_threads_that_cancel_while_another_begins() -> None:
    """Each execution is either begun or cancelled, and all three agree on which."""
    graph = Graph()
    count = 3000
    said: list[dict[int, bool]] = [{}, {}]
    done = threading.Event()

    def cancel(mine: dict[int, bool]) -> None:
        while not done.is_set():
            execution = graph.writer.published - 1
            if execution >= 0 and execution not in mine:
                mine[execution] = graph.cancel(execution)

    threads = [threading.Thread(target=cancel, args=(mine,)) for mine in said]
    for thread in threads:
        thread.start()
    try:
        begun = {}
        for execution in range(count):
            graph.execute()
            begun[execution] = graph.begin()
    finally:
        done.set()
        for thread in threads:
            thread.join(20)
    for mine in said:
        assert all(answer is not begun[execution] for execution, answer in mine.items())


PRELUDE = """
import os, random, select, sys, threading
import numpy as np
from raycomm.channel import RingLayout, ShmArena
from raycomm.options import Options
options = Options(shm_limit_bytes=64 << 20, max_inflight=4)
driver = ShmArena.create(0, [RingLayout(0, 4, 256, (1,))], options, loops=2, processes=2)
def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child failed"
"""

SAME_PROCESS = """
actor = ShmArena.create(1, [], options, loops=2)
driver.attach(actor.address)
actor.attach(driver.address)
driver.join(0)
actor.join(0)
writer = driver.writer([0])
reader = actor.reader(0, 0, 0, drain=True, claims=True)
core = driver.core
def awake():
    return bool(select.select([core.waker], [], [], 0)[0])
def ring():
    reader.read(5)  # taking a message rings the writer's bell
"""


def script(*parts: str, limit_s: float = 60) -> None:
    code = "".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_a_forked_child_cancels_nothing() -> None:
    script(
        PRELUDE,
        SAME_PROCESS,
        """
        writer.write("first")
        writer.write("second")
        assert core.cancel(1)
        def work():
            assert not core.cancel(0) and not core.cancel(1)
        in_child(work)
        assert reader.read(5) == "first"
        assert not core.cancel(0)
        assert core.cancel(1)
        """,
    )


def test_a_forked_child_neither_arms_nor_disarms() -> None:
    script(
        PRELUDE,
        SAME_PROCESS,
        """
        for number in range(4):
            writer.write(number)
        in_child(core.arm)
        ring()
        assert not awake(), "armed by the child"
        core.arm()
        in_child(core.disarm)
        ring()
        assert awake(), "disarmed by the child"
        os.read(core.waker, 100)
        core.arm()
        core.disarm()
        ring()
        assert not awake()
        """,
    )


def test_a_forked_child_gives_no_memory_back() -> None:
    script(
        PRELUDE,
        SAME_PROCESS,
        """
        for _ in range(3):
            writer.write(np.full(4 << 20, 7, np.uint8))
        held = reader.read(5)
        reader.read(5)
        kept = core.pool_committed, core.budget_used, core.pool_in_use
        assert kept[2] == 8 << 20
        def work():
            global held
            core.end()
            assert core.pool_in_use == 0
            held = None
            core.end()
        in_child(work)
        assert (core.pool_committed, core.budget_used, core.pool_in_use) == kept
        assert (held == 7).all() and (reader.read(5) == 7).all()
        core.end()
        assert (held == 7).all()
        assert (core.pool_committed, core.budget_used) == (4 << 20, 4 << 20)
        """,
    )


def test_two_processes_agree_on_every_execution(seed: int) -> None:
    """The driver cancels at random while an actor in a process of its own begins; what each believes is compared."""
    script(
        PRELUDE,
        f"seed = {seed}\n",
        """
        from multiprocessing import Pipe
        from raycomm.codec import Failure
        here, there = Pipe()
        count = 20_000
        child = os.fork()
        if child == 0:
            try:
                actor = ShmArena.create(1, [], options, loops=2)
                actor.attach(driver.address)
                actor.join(0)
                there.send(actor.address)
                reader = actor.reader(0, 0, 0, drain=True, claims=True)
                begun = bytearray(count)
                for execution in range(count):
                    begun[execution] = not isinstance(reader.read(20), Failure)
                there.send_bytes(begun)
                there.recv_bytes()
            finally:
                os._exit(0)
        driver.attach(here.recv())
        driver.join(0)
        writer = driver.writer([0])
        rng = random.Random(seed)
        cancelled = bytearray(count)
        for execution in range(count):
            writer.write(execution, 20)
            if rng.random() < 0.7:
                cancelled[execution] = driver.core.cancel(execution)
        begun = here.recv_bytes()
        here.send_bytes(b"end")
        os.waitpid(child, 0)
        both = [execution for execution in range(count) if begun[execution] == cancelled[execution]]
        assert not both, both[:10]
        assert sum(cancelled) > 100 and sum(begun) > 100, (sum(cancelled), sum(begun))
        """,
    )
