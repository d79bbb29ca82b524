"""The simulated device: streams, rendezvous, hangs with what waits for what, dead peers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from raycomm.errors import CollectiveError, CommunicatorClosedError, PeerDiedError, TensorMismatchError, TransferTimeoutError
from raycomm.testing.simulated import (
    Delays,
    Device,
    Event,
    Group,
    Poison,
    Queue,
    SimulatedHang,
    Tensor,
    World,
)
from tests.unit.simulated_tensors import INSTANT, filled


def exchange(policy: str, seed: int) -> list[Any]:
    """Two ranks, each sends first, then receives, then waits; what each received."""
    world = World(seed)
    devices = [Device(world, "A"), Device(world, "B")]
    one = Group(world, "both", devices)
    way = [Group(world, "A->B", devices), Group(world, "B->A", devices)] if policy == "link" else [one, one]

    def rank(me: int) -> Iterator[Event]:
        out = devices[me].stream("out")
        into = out if policy == "shared" else devices[me].stream("in")
        mine = filled(out, ("from", me))
        theirs = devices[me].allocate((), "term", into, "theirs")
        way[me].post_send(me, 1 - me, mine, out)
        yield way[1 - me].post_recv(me, 1 - me, theirs, into)
        return theirs.content

    for me in (0, 1):
        world.start(f"host {me}", rank(me), devices[me])
    return world.results()


@pytest.mark.parametrize("seed", range(20))
def test_both_send_first_on_one_stream_hangs_with_both_heads(seed: int) -> None:
    with pytest.raises(SimulatedHang) as caught:
        exchange("shared", seed)
    assert set(caught.value.heads) == {
        "host 0: waits for the end of recv from B on both on stream out of A",
        "host 1: waits for the end of recv from A on both on stream out of B",
        "stream out of A: send to B on both waits for B to receive on both, 1 behind it",
        "stream out of B: send to A on both waits for A to receive on both, 1 behind it",
    }
    assert f"seed {seed}" in str(caught.value)


@pytest.mark.parametrize("seed", range(20))
def test_one_communicator_is_one_queue_whatever_the_streams(seed: int) -> None:
    with pytest.raises(SimulatedHang) as caught:
        exchange("direction", seed)
    assert (
        "stream in of A: recv from B on both waits for send to B on both on stream out of A, which is older on both"
        in caught.value.heads
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_link_per_direction_with_its_own_stream_completes(seed: int) -> None:
    assert exchange("link", seed) == [("from", 1), ("from", 0)]


def test_a_seed_is_one_run_and_others_differ() -> None:
    def times(seed: int) -> float:
        world = World(seed)
        device = Device(world, "A")
        for name in "xyz":
            filled(device.stream(name), name)
        world.run()
        return world.now

    assert times(3) == times(3)
    assert len({times(seed) for seed in range(10)}) == 10


def test_a_send_occupies_its_stream_until_the_receive_comes() -> None:
    world = World(delays=INSTANT)
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    out = a.stream("out")
    sent = link.post_send(0, 1, filled(out, 1), out)
    behind = filled(out, 2)
    world.run(lambda: world.now >= 1.0)
    with pytest.raises(TransferTimeoutError, match=r"waits for B to receive on link") as caught:
        sent.synchronize(limit_s=50.0)
    assert (caught.value.limit_s, world.now) == (50.0, 51.0)
    into = b.stream("in")
    link.post_recv(1, 0, b.allocate((), "term", into), into)
    sent.synchronize()
    assert world.now == 52.0
    out.synchronize()
    assert behind.content == 2


def test_few_hardware_queues_are_shared_in_the_order_of_launch() -> None:
    def run(queues: int | None) -> None:
        world = World(delays=INSTANT)
        a, b = Device(world, "A", hardware_queues=queues), Device(world, "B")
        first, second = Group(world, "first", [a, b]), Group(world, "second", [a, b])
        streams = [a.stream("compute"), a.stream("x"), a.stream("y")]
        tensor = filled(streams[0], 0)
        streams[0].synchronize()
        first.post_send(0, 1, tensor, streams[0])  # "y" shares its queue where there are two.
        second.post_send(0, 1, tensor, streams[2])
        into = b.stream("in")
        for link in (second, first):
            link.post_recv(1, 0, b.allocate((), "term", into), into)
        world.run()

    run(None)
    run(3)
    with pytest.raises(SimulatedHang):
        run(2)


def test_random_programs_hang_exactly_when_no_pair_of_heads_is_left(rng: random.Random) -> None:
    """2000 random programs of sends and receives, against a reference that knows neither time nor devices."""
    hangs = 0
    for _ in range(2000):
        ranks, lists = rng.randint(2, 4), []
        transfers = [(number, *rng.sample(range(ranks), 2), rng.randrange(2)) for number in range(rng.randint(1, 6))]
        for rank in range(ranks):
            mine = [(number, a, b, link) for number, a, b, link in transfers if rank in (a, b)]
            if rng.random() < 0.4:
                rng.shuffle(mine)
            lists.append([(rng.randrange(3), *operation) for operation in mine])
        expected = reference_completes(lists)
        world = World(rng.getrandbits(32))
        devices = [Device(world, f"D{rank}") for rank in range(ranks)]
        links = {(a, b, link): Group(world, f"{a}->{b}#{link}", [devices[a], devices[b]]) for _, a, b, link in transfers}
        results: list[tuple[int, Tensor]] = []
        for rank, operations in enumerate(lists):
            for stream_number, number, a, b, link in operations:
                stream = devices[rank].stream(str(stream_number))
                if rank == a:
                    tensor = filled(stream, number)
                    links[a, b, link].post_send(0, 1, tensor, stream, tag=number)
                    tensor.record_stream(stream)
                else:
                    tensor = devices[rank].allocate((), "term", stream)
                    links[a, b, link].post_recv(1, 0, tensor, stream, tag=number)
                    results.append((number, tensor))
        try:
            world.run()
            completed = True
        except SimulatedHang:
            completed = False
        assert completed == expected, lists
        if completed:
            assert all(tensor.content == number for number, tensor in results)
        hangs += not completed
    assert 100 < hangs < 1900


def reference_completes(lists: list[list[tuple[int, int, int, int, int]]]) -> bool:
    """Take away transfers that both their ranks can do next: first on its stream, and first on its link, at either end."""
    left = [list(operations) for operations in lists]

    def next_ones(rank: int) -> set[int]:
        streams, links, free = set(), set(), set()
        for stream, number, a, b, link in left[rank]:
            if stream not in streams and (a, b, link) not in links:
                free.add(number)
            streams.add(stream)
            links.add((a, b, link))
        return free

    while any(left):
        able = {
            number
            for rank, operations in enumerate(left)
            for _, number, a, b, _ in operations
            if rank == a and number in next_ones(a) and number in next_ones(b)
        }
        if not able:
            return False
        number = min(able)
        left = [[operation for operation in operations if operation[1] != number] for operations in left]
    return True


def test_a_dead_peer_ends_waits() -> None:
    world = World(delays=INSTANT)
    devices = [Device(world, name) for name in "ABC"]
    link = Group(world, "link", devices)
    into = devices[0].stream("in")
    event = link.post_recv(0, 1, devices[0].allocate((), "term", into), into)
    late = link.post_recv(0, 2, devices[0].allocate((), "term", into), into)
    world.after(5.0, devices[1].kill)
    for waiting in (event, late):
        with pytest.raises(PeerDiedError, match=r"rank 1 \(B\) of link died") as caught:
            waiting.synchronize()
    assert (caught.value.peer, caught.value.communicator, world.now) == (1, "link", 6.0)
    with pytest.raises(PeerDiedError):
        link.post_send(0, 2, filled(into, 1), into).synchronize()


def test_a_peer_that_dies_in_the_middle_of_a_transfer_ends_it() -> None:
    world = World(delays=Delays(transfer=(100.0, 100.0)))
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    out, into = a.stream("out"), b.stream("in")
    link.post_send(0, 1, filled(out, 1), out)
    came = b.allocate((), "term", into)
    event = link.post_recv(1, 0, came, into)
    world.after(50.0, a.kill)
    with pytest.raises(PeerDiedError):
        event.synchronize()
    assert isinstance(came.block.content, Poison)
    assert world.now < 60.0


def test_the_program_of_a_killed_rank_ends() -> None:
    world = World()
    device = Device(world, "A")

    def forever() -> None:
        while True:
            try:
                Event(world, device.stream("x").record().operation).synchronize()
            except Exception:
                pass

    task = world.start("A", forever, device)
    world.after(10.0, device.kill)
    world.run()
    assert task.finished
    assert task.failure is None


def test_an_abort_ends_the_waits_of_all_ranks() -> None:
    world = World(delays=INSTANT)
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    out, into = a.stream("out"), b.stream("in")
    events = [link.post_send(0, 1, filled(out, 1), out), link.post_send(1, 0, filled(into, 2), into)]
    world.after(3.0, lambda: link.abort(0))
    for event in events:
        with pytest.raises(CommunicatorClosedError, match=r"link was aborted by rank 0 \(A\)"):
            event.synchronize()


def test_ends_that_disagree_about_the_tensor_fail_at_both() -> None:
    world = World(delays=INSTANT)
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    out, into = a.stream("out"), b.stream("in")
    events = [
        link.post_send(0, 1, a.allocate((2, 3), "float16", out), out),
        link.post_recv(1, 0, b.allocate((2, 3), "float32", into), into),
    ]
    for event in events:
        with pytest.raises(TensorMismatchError, match=r"rank 0 \(A\) sends float16 \[2, 3\], but rank 1 \(B\) receives float32"):
            event.synchronize()


def test_a_collective_needs_all_ranks_and_equal_tensors() -> None:
    world = World(delays=INSTANT)
    devices = [Device(world, name) for name in "ABC"]
    link = Group(world, "link", devices)
    streams = [device.stream("x") for device in devices]
    outs = [device.allocate((), "term", stream) for device, stream in zip(devices, streams, strict=True)]
    events = [
        link.post_collective("allreduce", rank, filled(streams[rank], rank), outs[rank], streams[rank], "sum") for rank in (0, 1)
    ]
    world.run(lambda: world.now >= 1.0)
    with pytest.raises(TransferTimeoutError, match="waits for C to take part on link"):
        events[0].synchronize(limit_s=10.0)
    events.append(link.post_collective("allreduce", 2, filled(streams[2], 2), outs[2], streams[2], "sum"))
    for event in events:
        event.synchronize()
    assert [out.content for out in outs] == [("allreduce", "sum", rank, (0, 1, 2)) for rank in range(3)]
    wrong = [device.allocate((rank,), "f", stream) for rank, (device, stream) in enumerate(zip(devices, streams, strict=True))]
    events = [link.post_collective("allreduce", rank, wrong[rank], outs[rank], streams[rank], "sum") for rank in range(3)]
    for event in events:
        with pytest.raises(CollectiveError, match=r"rank 1: allreduce on link, f \[1\]; rank 2"):
            event.synchronize()


def test_programs_on_threads_wait_like_generators_and_are_ended_by_a_hang() -> None:
    world = World()
    there, back = Queue(world, 1, "there"), Queue(world, 1, "back")

    def left() -> int:
        for number in range(5):
            world.wait(there.room)
            there.put(number)
        world.wait(back.message())
        return int(back.take())

    def right() -> Iterator[object]:
        total = 0
        for _ in range(5):
            yield there.message()
            total += there.take()
        yield back.room
        back.put(total)

    world.start("left", left)
    world.start("right", right())  # type: ignore[arg-type]
    assert world.results() == [10, None]
    stuck = world.start("stuck", lambda: world.wait(there.message()))
    with pytest.raises(SimulatedHang, match="stuck: waits for a message in there"):
        world.run()
    assert isinstance(stuck.failure, SimulatedHang)
