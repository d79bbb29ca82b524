"""Communicators of users that do not keep to what the interface asks for."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from raycomm.device.communicator import Received
from tests.ray.own_communicators import RaysGroup, SocketLink, _flat

WRONG = 3  # the value at which things go wrong


class FailsInSilence(SocketLink):
    """A send fails when its turn comes, and `poll` says nothing of it."""

    def poll(self) -> None: ...

    def send(self, tensor: torch.Tensor, peer: int, *, stream: Any = None) -> Any:
        def work() -> None:
            if int(tensor[0]) == WRONG:
                raise OSError("the cable is out")
            self._put(tensor, peer)

        return (stream or self.device.stream("all")).launch("send", work)


class FailsToSend(SocketLink):
    """A send fails when it is launched."""

    def send(self, tensor: torch.Tensor, peer: int, *, stream: Any = None) -> Any:
        if int(tensor[0]) == WRONG:
            raise OSError("the cable is out")
        return super().send(tensor, peer, stream=stream)


class FailsToAbort(FailsToSend):
    def abort(self, limit_s: float) -> None:
        raise RuntimeError("cannot abort")


class HangsInAbort(FailsToSend):
    def abort(self, limit_s: float) -> None:
        threading.Event().wait()


class ExitsInSend(SocketLink):
    def _put(self, tensor: torch.Tensor, peer: int) -> None:
        if int(tensor[0]) == WRONG:
            sys.exit("leaving")
        super()._put(tensor, peer)


class ExitsInRaysSend(RaysGroup):
    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        if int(value[0]) == WRONG:
            sys.exit("leaving")
        super().send(value, peer_rank)


class PollFails(SocketLink):
    def poll(self) -> None:
        if getattr(self, "asked", 0) > 40:
            raise OSError("poll broke")
        self.asked = getattr(self, "asked", 0) + 1
        super().poll()


class BrokenEvent:
    complete = False

    def synchronize(self, limit_s: float | None = None) -> None:
        raise OSError("event broke")


class EventFails(SocketLink):
    def recv(self, *args: Any, **kwargs: Any) -> Received:
        return Received(super().recv(*args, **kwargs).tensor, BrokenEvent())


class ReceivesLess(SocketLink):
    def recv(self, *args: Any, **kwargs: Any) -> Received:
        came = super().recv(*args, **kwargs)
        return Received(came.tensor[:10], came.event)


class ReceivesElsewhere(SocketLink):
    def recv(self, *args: Any, **kwargs: Any) -> Received:
        came = super().recv(*args, **kwargs)
        return Received(came.tensor.to("meta"), came.event)


class ExitsWhenMade(SocketLink):
    def __init__(self, *args: Any) -> None:
        sys.exit("leaving")


class ExitsInInitialize(RaysGroup):
    def initialize(self, rank: int) -> None:
        sys.exit("leaving")


class HangsWhenMade(SocketLink):
    def __init__(self, *args: Any) -> None:
        threading.Event().wait()


class HangsInWarmUp(SocketLink):
    def warm_up(self, limit_s: float) -> None:
        threading.Event().wait()


class HangsInInitialize(RaysGroup):
    def initialize(self, rank: int) -> None:
        threading.Event().wait()


class MadeLate(SocketLink):
    """Is made when nobody waits for it any more, which a file says; another one says that it was aborted."""

    def __init__(self, *args: Any, marks: str) -> None:
        self.marks = Path(marks)
        wait_for(self.marks / "go")
        super().__init__(*args)
        (self.marks / f"made {self.rank}").touch()

    def abort(self, limit_s: float) -> None:
        super().abort(limit_s)
        (self.marks / f"ended {self.rank}").touch()


class InitializedLate(RaysGroup):
    """The same of an object."""

    def __init__(self, handles: list[Any], marks: str) -> None:
        super().__init__(handles)
        self.marks = marks

    def initialize(self, rank: int) -> None:
        wait_for(Path(self.marks) / "go")
        super().initialize(rank)
        (Path(self.marks) / f"made {rank}").touch()

    def destroy(self) -> None:
        assert self._group is not None  # not while `initialize` runs
        super().destroy()
        (Path(self.marks) / f"ended {self._rank}").touch()


class KeepsThingsPerThread(RaysGroup):
    """As a library does that has a current device."""

    def initialize(self, rank: int) -> None:
        super().initialize(rank)
        self.local = threading.local()
        self.local.rank = rank

    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        assert self.local.rank == self._rank
        super().send(value, peer_rank)

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> torch.Tensor:
        assert self.local.rank == self._rank
        return super().recv(shape, dtype, peer_rank, allocator)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "local"}


class Falsy(RaysGroup):
    def __len__(self) -> int:
        return 0


class HangsInReceive(RaysGroup):
    """Hangs for good, and `destroy` does not end it."""

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> torch.Tensor:
        buffer: torch.Tensor = allocator(shape, dtype)
        self._group.recv([_flat(buffer)], peer_rank, 0).wait()
        if int(buffer[0]) == WRONG:
            threading.Event().wait()
        return buffer

    def destroy(self) -> None:
        Path(self._path).unlink(missing_ok=True)


def wait_for(path: Path, limit_s: float = 60.0) -> None:
    """Until there is such a file."""
    end = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)
