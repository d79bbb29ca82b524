"""What every communicator does: the simulated one, under several seeds, gloo between processes, and NCCL's on a stand-in."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raycomm.device import Communicator, Device, Event, Stream
from raycomm.errors import RankMissingError
from raycomm.testing.simulated import Device as SimulatedDevice
from raycomm.testing.simulated import SimulatedCommunicator, SimulatedHang, World, communicators
from raycomm.testing.simulated_world import Task
from tests.unit.communicator_programs import BIG, PROGRAMS, numbers

Run = Callable[[str, int], list[Any]]


# Whoever passes the limit first aborts, and the other one may see that before its own limit has passed.
TIMED_OUT = {"TransferTimeoutError", "PeerDiedError", "CommunicatorClosedError"}


class Never:
    """What nobody makes true."""

    def __init__(self) -> None:
        self.waiters: list[Task] = []

    def ready(self) -> bool:
        return False

    def __str__(self) -> str:
        return "nothing, it has died"


class SimulatedPlace:
    patience = 1000.0
    hours = 100_000.0

    def __init__(self, world: World, rank: int, devices: list[SimulatedDevice], links: dict[str, Any]) -> None:
        self.rank = rank
        self.device = devices[rank]
        self._world = world
        self._devices = devices
        self._links = links

    def link(self, name: str) -> SimulatedCommunicator:
        if name not in self._links:
            self._links[name] = communicators(self._world, name, self._devices)
        end: SimulatedCommunicator = self._links[name][self.rank]
        return end

    def pause(self) -> None:
        self._world.wait(Never(), 1.0)

    def elsewhere(self) -> Any:
        return SimulatedDevice(self._world, "elsewhere").stream("s")

    def die_while_sending(self, link: Any, peer: int) -> None:
        out = self.device.stream("out")
        sent = link.send(self.device.to_device(numbers(self.rank, BIG), out), peer, stream=out)

        def look() -> None:
            if sent.operation.begun:
                self.device.kill()
            else:
                self._world.after(0.001, look)

        look()
        self._world.wait(Never())

    def die(self) -> None:
        self._world.after(0.0, self.device.kill)
        self._world.wait(Never())


def simulated(seed: int) -> Run:
    def run(name: str, size: int) -> list[Any]:
        world = World(seed)
        devices = [SimulatedDevice(world, f"D{rank}") for rank in range(size)]
        links: dict[str, Any] = {}
        for rank in range(size):
            place = SimulatedPlace(world, rank, devices, links)
            world.start(f"rank {rank}", lambda place=place: PROGRAMS[name](place), devices[rank])  # type: ignore[misc]
        results = world.results()
        assert [fault for device in devices for fault in device.faults] == []
        return json.loads(json.dumps(results))  # type: ignore[no-any-return]

    return run


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    command = [sys.executable, "-m", "tests.unit.communicator_ranks"]
    root = Path(__file__).parents[2]
    stage = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert stage.stdin is not None
    assert stage.stdout is not None
    stdin, stdout = stage.stdin, stage.stdout

    def run(kind: str, name: str, size: int) -> list[Any]:
        path = tmp_path_factory.mktemp("store") / "store"
        stdin.write(f"{kind} {name} {size} {path}\n")
        stdin.flush()
        results = json.loads(stdout.readline())
        killed = {"raised": "nothing was said"}
        assert all("returned" in result or result == killed for result in results), results
        return [result.get("returned") for result in results]

    try:
        assert stdout.readline() == "ready\n"
        yield lambda kind: functools.partial(run, kind)
    finally:
        stdin.close()
        try:
            stage.wait(60)
        finally:
            stage.kill()
            stage.wait()
            stdout.close()


# On a machine with a GPU the same over NCCL itself.
CUDA = ["cuda"] if torch.cuda.is_available() else []


@pytest.fixture(params=["gloo", "nccl", *CUDA, "simulated 0", "simulated 1", "simulated 2", "simulated 3"])
def run(request: pytest.FixtureRequest, processes: Callable[[str], Run]) -> Run:
    kind, _, seed = request.param.partition(" ")
    return simulated(int(seed)) if seed else processes(kind)


@pytest.fixture(params=["gloo", "nccl", "rays", *CUDA, "simulated 0", "simulated 1"])
def plain(request: pytest.FixtureRequest, processes: Callable[[str], Run]) -> Run:
    """Those, and an object of Ray's interface, whose time-outs and deaths are the business of whoever wrote it."""
    kind, _, seed = request.param.partition(" ")
    return simulated(int(seed)) if seed else processes(kind)


@pytest.fixture(params=["gloo", "simulated 0", "simulated 1", "simulated 2", "simulated 3"])
def compares(request: pytest.FixtureRequest, processes: Callable[[str], Run]) -> Run:
    """Those that look at what the other ranks launched. NCCL does not."""
    kind, _, seed = request.param.partition(" ")
    return simulated(int(seed)) if seed else processes(kind)


def exchanged(rank: int) -> list[float]:
    return [1000.0 * (1 - rank), BIG - 1.0 + 1000 * (1 - rank), 1.0]


def test_both_are_what_the_interfaces_ask_for() -> None:
    from raycomm.device.cpu import CpuDevice, CpuEvent, CpuStream
    from raycomm.device.gloo import GlooCommunicator

    world = World()
    device = SimulatedDevice(world, "D")
    (end,) = communicators(world, "alone", [device])
    cpu = CpuDevice()
    for communicator in (end, GlooCommunicator(torch.distributed.HashStore(), "alone", 0, 1, device=cpu)):
        assert isinstance(communicator, Communicator)
        assert isinstance(communicator.device, Device)
        stream = communicator.device.stream("s")
        assert isinstance(stream, Stream)
        event = stream.record()
        assert isinstance(event, Event)
        event.synchronize(10.0)
        assert event.complete
    assert isinstance(cpu.stream("s"), CpuStream)
    assert isinstance(cpu.stream("s").record(), CpuEvent)


def test_two_ranks_exchange_over_a_link_per_direction(plain: Run) -> None:
    assert plain("exchange_by_link", 2) == [exchanged(0), exchanged(1)]


def test_both_send_first_on_one_stream_is_a_time_out_that_names_the_wait(run: Run) -> None:
    errors = run("exchange_on_one_stream", 2)
    assert {error["type"] for error in errors} <= TIMED_OUT
    first = next(error for error in errors if error["type"] == "TransferTimeoutError")
    assert "on both" in first["waits_for"]


def test_a_block_sets_the_streams(run: Run) -> None:
    results = run("exchange_on_chosen_streams", 2)
    assert [good for good, _ in results] == [True, True]
    assert "TransferTimeoutError" in {bad["type"] for _, bad in results} <= TIMED_OUT


def test_any_dtype_and_shape(plain: Run) -> None:
    assert plain("dtypes", 2)[1] == []


def test_messages_stay_in_order_and_their_memory_is_kept(plain: Run) -> None:
    assert plain("in_order", 2) == [None, list(range(40))]


def test_a_given_buffer_is_filled(plain: Run) -> None:
    assert plain("given_buffer", 2)[1] == [True, [float(number) for number in range(8)]]


def test_a_receiver_that_expects_something_else_fails_and_the_rest_works(compares: Run) -> None:
    error, other = compares("mismatch", 2)[1]
    assert error["type"] == "TensorMismatchError"
    assert (error["expected"], error["given"]) == ("float16 [2, 4]", "float32 [8]")
    assert error["communicator"] == "link"
    assert other == [float(number) for number in range(8)]


def refused(errors: list[Any], rank: int) -> None:
    assert [error["type"] for error in errors] == [
        "TensorMismatchError",
        "TensorMismatchError",
        "WrongDeviceError",
        "WrongDeviceError",
        *["CommunicatorError"] * 3,
        *["WrongDeviceError"] * 3,
        "CommunicatorError",
    ]
    assert all(error["rank"] == rank and error["communicator"] == "link" for error in errors[:-1])
    assert "its peers are" in errors[4]["text"]


def test_what_cannot_work_is_refused_before_the_launch(plain: Run) -> None:
    for rank, errors in enumerate(plain("refused_before_launch", 2)):
        refused(errors, rank)


def test_what_cannot_work_is_refused_though_a_peer_has_died(run: Run) -> None:
    refused(run("refused_after_the_death_of_a_peer", 2)[0], 0)


def test_collectives(plain: Run) -> None:
    mine = [[[2.0 * row + column + 10 * rank for column in range(2)] for row in range(3)] for rank in range(3)]
    total = [[sum(mine[rank][row][column] for rank in range(3)) for column in range(2)] for row in range(3)]
    mean = [[value / 3 for value in row] for row in total]
    for rank, results in enumerate(plain("collectives", 3)):
        assert results == [total, mine[2], mean, mine[0] + mine[1] + mine[2], [total[rank]], mine[1]]


def test_every_operation_on_every_dtype_gives_what_the_cpu_gives_or_is_refused(run: Run) -> None:
    for wrong, refused in run("operations", 3):
        assert wrong == []
        assert refused > 0


def test_collectives_over_unequal_tensors_fail_at_all_ranks(compares: Run) -> None:
    for shapes, average, scatter in compares("unequal_collectives", 3):
        assert shapes["type"] == "CollectiveError"
        assert "rank 2: allreduce" in shapes["text"]
        assert "[4]" in shapes["text"]
        assert (average["type"], scatter["type"]) == ("CollectiveError", "TensorMismatchError")


def test_a_rank_that_never_comes_is_named(run: Run) -> None:
    error, after = run("missing_rank", 2)[0]
    assert error["type"] == after == "RankMissingError"
    assert error["missing"] == [1]


def test_a_dead_peer_ends_waits(run: Run) -> None:
    at_first, _, at_last = run("dead_peer", 3)
    for first, poll, later in (at_first, at_last):
        assert (first["type"], poll, later) == ("PeerDiedError",) * 3
    assert at_first[0]["peer"] == 1


def test_the_death_of_a_peer_is_seen_by_who_asks(run: Run) -> None:
    error = run("dead_while_idle", 2)[0]
    assert (error["type"], error["communicator"], error["peer"]) == ("PeerDiedError", "link", 1)


def test_a_peer_that_dies_in_the_middle_of_a_transfer_ends_it(run: Run) -> None:
    error = run("dead_in_the_middle", 2)[0]
    assert (error["type"], error["communicator"], error["peer"]) == ("PeerDiedError", "link", 1)


def test_an_abort_ends_the_waits_of_all_ranks(run: Run) -> None:
    first, second = run("abort", 2)
    assert first == ["CommunicatorClosedError"] * 2
    assert second in ("CommunicatorClosedError", "PeerDiedError")


def test_a_cold_communicator_blocks_the_host_at_its_first_operation() -> None:
    """Two ranks that begin with different communicators wait for each other on the host; warmed up, they do not."""
    for warmed in (False, True):
        world = World()
        devices = [SimulatedDevice(world, "D0"), SimulatedDevice(world, "D1")]
        links = [communicators(world, name, devices) for name in ("0->1", "1->0")]

        def program(rank: int, links: Any = links, devices: Any = devices, warmed: bool = warmed) -> None:
            for link in links if warmed else ():
                link[rank].warm_up(100.0)
            out, into = devices[rank].stream("out"), devices[rank].stream("in")
            links[rank][rank].send(devices[rank].to_device(numbers(rank), out), 1 - rank, stream=out)
            links[1 - rank][rank].recv((8,), torch.float32, 1 - rank, stream=into).event.synchronize()

        tasks = [world.start(f"rank {rank}", lambda rank=rank: program(rank)) for rank in (0, 1)]  # type: ignore[misc]
        if warmed:
            assert world.results() == [None, None]
        else:
            with pytest.raises(SimulatedHang) as caught:
                world.run()
            assert "rank 0: waits for rank 1 (D1) to come to the first operation or warm-up of 0->1" in caught.value.heads
            assert "rank 1: waits for rank 0 (D0) to come to the first operation or warm-up of 1->0" in caught.value.heads
            assert all(task.finished for task in tasks)


def test_communicators_warmed_in_different_orders_miss_each_other_within_the_limit() -> None:
    world = World()
    links = [communicators(world, name, [SimulatedDevice(world, f"{name} {rank}") for rank in (0, 1)]) for name in "ab"]

    def program(rank: int) -> None:
        for link in links if rank == 0 else links[::-1]:
            link[rank].warm_up(100.0)

    tasks = [world.start(f"rank {rank}", lambda rank=rank: program(rank)) for rank in (0, 1)]  # type: ignore[misc]
    world.run()
    assert [type(task.failure) for task in tasks] == [RankMissingError] * 2
    assert "waited 100.0 s in vain for rank 1 (a 1) to warm up" in str(tasks[0].failure)
