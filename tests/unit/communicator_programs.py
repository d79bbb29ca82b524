"""Programs of ranks, for any communicator.

A program is a function of a `Place`. What it returns goes to the test as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from raycomm.device import Communicator, Device, streams
from raycomm.device.combining import combine
from raycomm.errors import CollectiveError, RaycommError

BIG = 1_000_000
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint16, torch.bool, torch.complex64)


class Place(Protocol):
    """Where a rank's program runs. `patience` is a limit that only a wait without end reaches, `hours` one that none does."""

    rank: int
    device: Device
    patience: float
    hours: float

    def link(self, name: str) -> Communicator:
        """This rank's end of the communicator of that name, over all ranks; not warmed up."""

    def pause(self) -> None:
        """Let some time pass."""

    def elsewhere(self) -> Any:
        """A stream of another device."""

    def die(self) -> None:
        """End this rank, without a word."""

    def die_while_sending(self, link: Any, peer: int) -> None:
        """End this rank in the middle of the send of a million floats."""


def warm(place: Place, *names: str) -> list[Communicator]:
    links = [place.link(name) for name in names]
    for link in links:
        link.warm_up(place.hours)
    return links


def refusal(call: Callable[[], Any]) -> dict[str, Any]:
    """The error that `call` raises: type, text, attributes."""
    try:
        call()
    except RaycommError as error:
        attributes = {name: list(value) if isinstance(value, tuple) else value for name, value in error.attributes.items()}
        return {"type": type(error).__name__, "text": str(error), **attributes}
    return {"type": None}


def numbers(rank: int, count: int = 8) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank


def exchange(place: Place, way_out: Communicator, way_in: Communicator, out: Any, into: Any) -> list[float]:
    """Send first, then receive, then wait: a million floats; the ends of what was received."""
    peer = 1 - place.rank
    mine = place.device.to_device(numbers(place.rank, BIG), out)
    sent = way_out.send(mine, peer, stream=out)
    came = way_in.recv((BIG,), torch.float32, peer, stream=into)
    came.event.synchronize(place.patience)
    sent.synchronize(place.patience)
    got = place.device.to_host(came.tensor, into)
    return [float(got[0]), float(got[-1]), float((got == numbers(peer, BIG)).all())]


def exchange_by_link(place: Place) -> Any:
    forth, back = warm(place, "0->1", "1->0")
    ways = (forth, back) if place.rank == 0 else (back, forth)
    return exchange(place, *ways, place.device.stream("out"), place.device.stream("in"))


def exchange_on_one_stream(place: Place) -> Any:
    (link,) = warm(place, "both")
    stream = place.device.stream("one")
    error = refusal(lambda: exchange(place, link, link, stream, stream))
    link.abort(place.patience)
    return error


def exchange_on_chosen_streams(place: Place) -> Any:
    """The same two links, once with streams that hang, once with streams that do not; and an inner choice before an outer."""
    forth, back = warm(place, "0->1", "1->0")
    out, into, other = (place.device.stream(name) for name in ("out", "in", "other"))
    way_out, way_in = (forth, back) if place.rank == 0 else (back, forth)
    peer = 1 - place.rank

    def receive(made_on: Any) -> Any:
        mine = place.device.to_device(numbers(place.rank, BIG), made_on)
        way_out.send(mine, peer)
        return way_in.recv((BIG,), torch.float32, peer)

    with streams(forth, back, send=out, recv=out), streams(way_in, recv=into):
        came = receive(out)
    got = place.device.to_host(came.tensor, into, place.hours)
    with streams(forth, back, send=other, recv=other):  # the other rank may have given up before this one launches
        bad = refusal(lambda: receive(other).event.synchronize(place.patience))
    forth.abort(place.patience)
    back.abort(place.patience)
    return bool((got == numbers(peer, BIG)).all()), bad


def dtypes(place: Place) -> Any:
    """The last ones are kept negated or conjugated by torch, where the device's tensors are torch's."""
    (link,) = warm(place, "link")
    stream = place.device.stream("s")
    wrong = []
    views: list[Any] = [lambda tensor: tensor, torch._neg_view, torch.conj]
    for dtype in DTYPES:
        for shape in ((), (0, 3), (2, 3, 4)):
            for view in views[: 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1]:
                values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
                values = values * (1 + 2j) if dtype.is_complex else values
                given = place.device.to_device(values, stream)
                own = isinstance(given, torch.Tensor)
                if place.rank == 0:
                    link.send(view(given) if own else given, 1, stream=stream).synchronize(place.hours)
                    continue
                expected = view(values) if own else values
                got = place.device.to_host(link.recv(shape, dtype, 0, stream=stream).tensor, stream, place.hours)
                wrong += [] if got.dtype == dtype and torch.equal(got, expected) else [f"{dtype} {shape}: {got}"]
    return wrong


def in_order(place: Place) -> Any:
    """Many messages, of which none is waited for until the end; the receiver waits before each; buffers are dropped at once."""
    (link,) = warm(place, "link")
    make, out, into = (place.device.stream(name) for name in ("make", "out", "in"))
    if place.rank == 0:
        for number in range(40):
            tensor = place.device.to_device(torch.full((1000,), number), make)
            out.wait(make.record())
            link.send(tensor, 1, stream=out)
            del tensor
        out.synchronize(place.hours)
        return None
    got = []
    for _ in range(40):
        tensor = link.recv((1000,), torch.int64, 0, stream=into).tensor
        host = place.device.to_host(tensor, into, place.hours)
        got.append(int(host[0]) if bool((host == host[0]).all()) else None)
    return got


def given_buffer(place: Place) -> Any:
    (link,) = warm(place, "link")
    stream = place.device.stream("s")
    if place.rank == 0:
        link.send(place.device.to_device(numbers(0), stream), 1, stream=stream).synchronize(place.hours)
        return None
    buffer = place.device.allocate((8,), torch.float32, stream)
    came = link.recv((8,), torch.float32, 0, stream=stream, into=buffer)
    return came.tensor is buffer, place.device.to_host(buffer, stream, place.hours).tolist()


def mismatch(place: Place) -> Any:
    """The receiver expects another shape; afterwards another communicator works."""
    link, other = warm(place, "link", "other")
    stream, free = place.device.stream("s"), place.device.stream("free")
    if place.rank == 0:
        link.send(place.device.to_device(numbers(0), stream), 1, stream=stream)
        other.send(place.device.to_device(numbers(0), free), 1, stream=free).synchronize(place.hours)
        return None
    error = refusal(lambda: link.recv((2, 4), torch.float16, 0, stream=stream).event.synchronize(place.hours))
    return error, place.device.to_host(other.recv((8,), torch.float32, 0, stream=free).tensor, free, place.hours).tolist()


def refused_before_launch(place: Place) -> Any:
    (link,) = warm(place, "link")
    return refusals(place, link)


def refused_after_the_death_of_a_peer(place: Place) -> Any:
    """What is wrong with a call is said whatever has become of the others."""
    (link,) = warm(place, "link")
    if place.rank == 1:
        place.die()
    while refusal(link.poll)["type"] is None:
        place.pause()
    return refusals(place, link)


def refusals(place: Place, link: Communicator) -> list[dict[str, Any]]:
    stream, peer = place.device.stream("s"), 1 - place.rank
    buffer = place.device.allocate((8,), torch.float32, stream)
    elsewhere = torch.empty(8, device="meta")
    return [
        refusal(lambda: link.recv((2, 4), torch.float32, peer, stream=stream, into=buffer)),
        refusal(lambda: link.recv((8,), torch.float16, peer, stream=stream, into=buffer)),
        refusal(lambda: link.recv((8,), torch.float32, peer, stream=stream, into=elsewhere)),
        refusal(lambda: link.send(elsewhere, peer, stream=stream)),
        refusal(lambda: link.send(buffer, place.rank, stream=stream)),
        refusal(lambda: link.send(buffer, 7, stream=stream)),
        refusal(lambda: link.broadcast(buffer, 7, stream=stream)),
        refusal(lambda: link.send(buffer, peer, stream=place.elsewhere())),
        refusal(lambda: link.allreduce(elsewhere, stream=stream)),
        refusal(lambda: link.allreduce(buffer, stream=place.elsewhere())),
        refusal(lambda: streams(link).__enter__()),
    ]


def collectives(place: Place) -> Any:
    (link,) = warm(place, "link")
    stream = place.device.stream("s")

    def mine() -> Any:
        return place.device.to_device(torch.arange(6.0).reshape(3, 2) + 10 * place.rank, stream)

    def host(received: Any) -> Any:
        return place.device.to_host(received.tensor, stream, place.hours).tolist()

    return [
        host(link.allreduce(mine(), stream=stream)),
        host(link.allreduce(mine(), "max", stream=stream)),
        host(link.allreduce(mine(), "avg", stream=stream)),
        host(link.allgather(mine(), stream=stream)),
        host(link.reducescatter(mine(), stream=stream)),
        host(link.broadcast(mine(), 1, stream=stream)),
    ]


def operations(place: Place) -> Any:
    """Every operation on every dtype; what came out differently from the same on the CPU, and what was refused."""
    (link,) = warm(place, "link")
    wrong: list[str] = []
    refused: list[str] = []
    for op in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor"):
        for dtype in (*DTYPES, torch.int32, torch.float64, torch.uint8):
            parts = [(numbers(rank, 2 * link.size) % 5 + rank).to(dtype) for rank in range(link.size)]
            for kind in ("allreduce", "reducescatter"):
                what = f"{kind} {op} {dtype}"
                stream = place.device.stream(what)  # one on which something has failed has failed for good
                try:
                    expected = combine(kind, op, None, place.rank, parts)
                except (ValueError, RuntimeError, TypeError):
                    expected = None
                try:
                    launch = link.allreduce if kind == "allreduce" else link.reducescatter
                    came = launch(place.device.to_device(parts[place.rank], stream), op, stream=stream)
                    came.event.synchronize(place.hours)
                except CollectiveError:
                    refused.append(what)
                    if expected is not None:
                        wrong.append(f"{what} was refused")
                    continue
                got = place.device.to_host(came.tensor, stream)
                if expected is None or got.dtype != dtype or not torch.allclose(got, expected.to(dtype), rtol=1e-2):
                    wrong.append(f"{what}: {got.tolist()} for {None if expected is None else expected.tolist()}")
    return wrong, len(refused)


def unequal_collectives(place: Place) -> Any:
    shapes, average = warm(place, "shapes", "average")
    results = []
    wrong = place.device.to_device(torch.zeros(2 + place.rank), place.device.stream("a"))
    results.append(refusal(lambda: shapes.allreduce(wrong, stream=place.device.stream("a")).event.synchronize(place.hours)))
    whole = place.device.to_device(torch.tensor([1, 2, 3, 4]), place.device.stream("b"))
    results.append(
        refusal(lambda: average.allreduce(whole, "avg", stream=place.device.stream("b")).event.synchronize(place.hours))
    )
    results.append(refusal(lambda: average.reducescatter(whole, stream=place.device.stream("c"))))
    return results


def missing_rank(place: Place) -> Any:
    if place.rank == 1:
        return None
    link = place.link("link")
    error = refusal(lambda: link.warm_up(place.patience))
    return error, refusal(link.poll)["type"]


def dead_peer(place: Place) -> Any:
    """Rank 1 dies while rank 0 waits for a million floats from it, and rank 2 for a collective."""
    (link,) = warm(place, "link")
    stream = place.device.stream("s")
    if place.rank == 1:
        place.die()

    def launch() -> Any:  # which raises by itself where the death is known already
        if place.rank == 0:
            return link.recv((BIG,), torch.float32, 1, stream=stream)
        return link.allreduce(place.device.to_device(numbers(0), stream), stream=stream)

    first = refusal(lambda: launch().event.synchronize(place.hours))
    tensor = place.device.to_device(numbers(0), place.device.stream("t"))
    return first, refusal(link.poll)["type"], refusal(lambda: link.send(tensor, 1))["type"]


def dead_while_idle(place: Place) -> Any:
    """Nobody waits for rank 1 when it dies; who asks, learns of it."""
    (link,) = warm(place, "link")
    if place.rank == 1:
        place.die()
    for _ in range(1000):
        if (error := refusal(link.poll))["type"]:
            return error
        place.pause()
    return None


def dead_in_the_middle(place: Place) -> Any:
    (link,) = warm(place, "link")
    stream = place.device.stream("s")
    if place.rank == 1:
        place.die_while_sending(link, 0)
    came = link.recv((BIG,), torch.float32, 1, stream=stream)
    return refusal(lambda: came.event.synchronize(place.hours))


def abort(place: Place) -> Any:
    """Rank 0 aborts while both wait for a receive."""
    (link,) = warm(place, "link")
    stream = place.device.stream("s")
    if place.rank == 1:
        link.send(place.device.to_device(numbers(1), stream), 0, stream=stream)
        return refusal(lambda: link.recv((8,), torch.float32, 0, stream=stream).event.synchronize(place.hours))["type"]
    place.device.to_host(link.recv((8,), torch.float32, 1, stream=stream).tensor, stream, place.hours)
    came = link.recv((8,), torch.float32, 1, stream=stream)
    link.abort(place.patience)
    link.abort(place.patience)
    return [refusal(lambda: came.event.synchronize(place.hours))["type"], refusal(link.poll)["type"]]


PROGRAMS = {
    program.__name__: program
    for program in (
        exchange_by_link,
        exchange_on_one_stream,
        exchange_on_chosen_streams,
        dtypes,
        in_order,
        given_buffer,
        mismatch,
        refused_before_launch,
        refused_after_the_death_of_a_peer,
        collectives,
        operations,
        unequal_collectives,
        missing_rank,
        dead_peer,
        dead_while_idle,
        dead_in_the_middle,
        abort,
    )
}
