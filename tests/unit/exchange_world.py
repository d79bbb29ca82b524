"""The actors of a graph's collectives as threads of this process, on real rings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raycomm import _core
from raycomm.channel import ShmArena, ShmWriter
from raycomm.codec import Failure, encode_failure
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allgather, allreduce, broadcast, reducescatter
from raycomm.graph.model import CollectiveKind, ReduceOp
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import Options
from raycomm.plan.actions import Collective, Plan
from raycomm.plan.lowering import lower
from raycomm.plan.verify import verify
from raycomm.runtime.blueprint import DRIVER, rings_of
from raycomm.runtime.collectives import Exchange
from tests.unit.stub_actors import actor

GUARD_S = 60.0

Key = tuple[CollectiveKind, ReduceOp | None]


def plan_of(world: int, tensors: int = 1) -> Plan:
    """Every kind of collective, with every operation, among `world` actors, with `tensors` per actor in an allreduce."""
    workers = [actor(f"W{index}") for index in range(world)]
    inp = InputNode()
    rows = [[bind(w.forward, inp) for w in workers] for _ in range(tensors)]
    results: list[Any] = []
    for op in ReduceOp:
        reduced = allreduce(rows if tensors > 1 else rows[0], op)
        results += reduced if tensors == 1 else [node for row in reduced for node in row]
        results += reducescatter(rows[0], op)
    results += allgather(rows[0])
    results += broadcast(rows[0], root=world - 1)
    plan = lower(build(MultiOutputNode(results)), "world")
    verify(plan)
    return plan


class World:
    """Ranks 0, 1, ... of one plan, each with its memory and its part in every collective. Close it."""

    def __init__(self, world: int, tensors: int = 1, limit: int = 256 << 20) -> None:
        plan = plan_of(world, tensors)
        options = Options(shm_limit_bytes=limit, max_inflight=2)
        self.size = world
        self.executions = 0
        driver = ShmArena.create(DRIVER, rings_of(plan, DRIVER, options), options, loops=world, processes=world + 1)
        driver.join(DRIVER)
        processes = range(1, world + 1)
        self.arenas = [ShmArena.create(process, rings_of(plan, process, options), options, loops=world) for process in processes]
        for arena in self.arenas:
            arena.attach(driver.address)
            arena.join(DRIVER)
            for other in self.arenas:
                if other is not arena:
                    arena.attach(other.address)
        self.exchanges: list[dict[Key, Exchange]] = [{} for _ in range(world)]
        for rank, arena in enumerate(self.arenas):
            for place, action in enumerate(plan.actors[rank].actions):
                if isinstance(action, Collective):
                    exchange = Exchange(action, plan, rank + 1, arena, send_failure, unsent, place)
                    self.exchanges[rank][action.kind, action.op] = exchange
        self._pool = ThreadPoolExecutor(world)

    def run(self, kind: CollectiveKind, op: ReduceOp | None, given: Sequence[Any]) -> list[tuple[Any, ...]]:
        """What each rank gets from one execution of one collective; `given` has one tuple of values per rank."""
        execution = self.executions
        self.executions += 1
        calls = [self._pool.submit(self.exchanges[rank][kind, op].run, values, execution) for rank, values in enumerate(given)]
        return [call.result(GUARD_S) for call in calls]

    def close(self) -> None:
        for arena in self.arenas:
            arena.close(_core.CLOSED_TEARDOWN, 0)
        self._pool.shutdown()
        self.exchanges.clear()
        self.arenas.clear()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def send_failure(writer: ShmWriter, failure: Failure) -> None:
    writer.write_failure(*encode_failure(failure))


def unsent(error: Exception, channels: tuple[int, ...]) -> Failure:
    return Failure.capture(error, f"channel {channels}", 0)
