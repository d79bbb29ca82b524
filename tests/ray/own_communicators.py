"""Communicators as users may write them: a class with raycomm's interface, over sockets, and classes with Ray's."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from ray.experimental.channel.communicator import Communicator as RaysCommunicator

from raycomm.device.combining import combine
from raycomm.device.communicator import Received
from raycomm.device.cpu import CpuDevice, CpuEvent
from raycomm.errors import CommunicatorClosedError, CommunicatorError, PeerDiedError

_LENGTH = struct.Struct("<Q")
_SETUP_S = 20.0


class SocketLink:
    """Tensors through sockets, one per pair of ranks; collectives through rank 0."""

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.device = CpuDevice(f"host memory at rank {rank} of {name}")
        self._store = store
        self._peers: dict[int, socket.socket] = {}
        self._failure: CommunicatorError | None = None

    def warm_up(self, limit_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(0.01)
            self._store.set(f"{self.name} {self.rank}", str(listening.getsockname()[1]))
            for peer in range(self.rank):
                while not self._store.check([f"{self.name} {peer}"]):
                    self.poll()
                    time.sleep(0.005)
                port = int(self._store.get(f"{self.name} {peer}"))
                self._peers[peer] = socket.create_connection(("127.0.0.1", port), _SETUP_S)
                self._peers[peer].sendall(_LENGTH.pack(self.rank))
            while len(self._peers) < self.size - 1:
                self.poll()
                with contextlib.suppress(TimeoutError):
                    connection, _ = listening.accept()
                    self._peers[_LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]] = connection
        for connection in self._peers.values():
            connection.settimeout(None)
        self._store = None

    def send(self, tensor: torch.Tensor, peer: int, *, stream: Any = None) -> CpuEvent:
        return self._launch(stream, lambda: self._put(tensor, peer))

    def recv(self, shape: Any, dtype: Any, peer: int, *, stream: Any = None, into: torch.Tensor | None = None) -> Received:
        buffer = torch.empty(shape, dtype=dtype) if into is None else into
        return Received(buffer, self._launch(stream, lambda: self._take(buffer, peer)))

    def broadcast(self, tensor: torch.Tensor, root: int, *, stream: Any = None) -> Received:
        def work() -> None:
            if self.rank != root:
                self._take(tensor, root)
                return
            for peer in self._peers:
                self._put(tensor, peer)

        return Received(tensor, self._launch(stream, work))

    def allreduce(self, tensor: torch.Tensor, op: str = "sum", *, stream: Any = None) -> Received:
        return self._together("allreduce", tensor, tensor.shape, op, stream)

    def allgather(self, tensor: torch.Tensor, *, stream: Any = None) -> Received:
        return self._together("allgather", tensor, (tensor.shape[0] * self.size, *tensor.shape[1:]), None, stream)

    def reducescatter(self, tensor: torch.Tensor, op: str = "sum", *, stream: Any = None) -> Received:
        return self._together("reducescatter", tensor, (tensor.shape[0] // self.size, *tensor.shape[1:]), op, stream)

    def poll(self) -> None:
        if self._failure is not None:
            raise self._failure.fresh()

    def abort(self, limit_s: float) -> None:
        self._failure = self._failure or CommunicatorClosedError(f"{self.name} was aborted")
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _together(self, kind: str, tensor: torch.Tensor, shape: Any, op: str | None, stream: Any) -> Received:
        out = torch.empty(shape, dtype=tensor.dtype)

        def work() -> None:
            if self.rank:
                self._put(tensor, 0)
                self._take(out, 0)
                return
            parts = [tensor] + [torch.empty_like(tensor) for _ in self._peers]
            for peer in self._peers:
                self._take(parts[peer], peer)
            for peer in self._peers:
                self._put(combine(kind, op, None, peer, parts), peer)
            out.copy_(combine(kind, op, None, 0, parts))

        return Received(out, self._launch(stream, work))

    def _launch(self, stream: Any, work: Callable[[], None]) -> CpuEvent:
        self.poll()

        def turn() -> None:
            self.poll()
            try:
                work()
            except OSError as error:
                self._failure = self._failure or PeerDiedError(f"{self.name}: {error}")
                raise self._failure.fresh() from error

        on = stream or self.device.stream("all")
        return on.launch(f"a transfer on {self.name}", turn)

    def _put(self, tensor: torch.Tensor, peer: int) -> None:
        data = pickle.dumps(tensor.contiguous(), protocol=5)
        self._peers[peer].sendall(_LENGTH.pack(len(data)) + data)

    def _take(self, buffer: torch.Tensor, peer: int) -> None:
        connection = self._peers[peer]
        (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        buffer.copy_(pickle.loads(_exactly(connection, length)).view(buffer.shape))


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other end has gone")
        parts += part
    return bytes(parts)


class OfNothing(SocketLink):
    """Its constructor fails."""

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        raise OSError("no such device")


class ForOthers:
    """Makes something else than an end."""

    def __new__(cls, *args: Any) -> Any:
        return "nothing of the kind"

    warm_up = send = recv = allreduce = allgather = reducescatter = broadcast = poll = abort = SocketLink.poll


class Half:
    """Lacks some of the interface."""

    def send(self, tensor: Any, peer: int) -> None: ...
    def recv(self, shape: Any, dtype: Any, peer: int) -> None: ...


class RaysGroup(RaysCommunicator):  # type: ignore[misc]
    """Ray's interface over gloo. Every call blocks until the transfer has ended at this rank.

    Args:
        handles: of its actors, by rank.
        transport: what Ray takes it for.
        path: of the file in which they meet.
    """

    def __init__(self, handles: list[Any], transport: str = "accelerator", path: str | None = None) -> None:
        self._handles = handles
        self._transport = transport
        self._path = path or tempfile.mktemp(prefix="raycomm-test-group-")
        self._rank: int | None = None
        self._group: Any = None

    def initialize(self, rank: int) -> None:
        self._rank = rank
        dist: Any = torch.distributed
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=_SETUP_S)
        store = dist.FileStore(self._path, len(self._handles))
        self._group = dist.ProcessGroupGloo(store, rank, len(self._handles), options)

    def get_actor_handles(self) -> list[Any]:
        return self._handles

    def get_rank(self, actor: Any) -> int:
        return [handle._actor_id for handle in self._handles].index(actor._actor_id)

    def get_self_rank(self) -> int | None:
        return self._rank

    def get_world_size(self) -> int:
        return len(self._handles)

    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        self._group.send([_flat(value)], peer_rank, 0).wait()

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> torch.Tensor:
        buffer: torch.Tensor = allocator(shape, dtype)
        self._group.recv([_flat(buffer)], peer_rank, 0).wait()
        return buffer

    @property
    def recv_stream(self) -> Any:
        raise NotImplementedError

    @property
    def send_stream(self) -> Any:
        raise NotImplementedError

    def allreduce(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any) -> None:
        parts = [torch.empty_like(send_buf) for _ in self._handles]
        self._group.allgather([parts], [send_buf]).wait()
        recv_buf.copy_(combine("allreduce", op.name.lower(), None, self._rank, parts))

    def allgather(self, send_buf: torch.Tensor, recv_buf: torch.Tensor) -> None:
        parts = [torch.empty_like(send_buf) for _ in self._handles]
        self._group.allgather([parts], [send_buf]).wait()
        torch.cat(parts, out=recv_buf)

    def reducescatter(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any) -> None:
        parts = [torch.empty_like(send_buf) for _ in self._handles]
        self._group.allgather([parts], [send_buf]).wait()
        recv_buf.copy_(combine("reducescatter", op.name.lower(), None, self._rank, parts))

    def destroy(self) -> None:
        peer = ((self._rank or 0) + 1) % len(self._handles)
        with contextlib.suppress(RuntimeError):  # which is how gloo ends what is under way
            self._group.recv([torch.zeros(1, dtype=torch.uint8)], peer, 9).wait(timedelta(milliseconds=1))
        Path(self._path).unlink(missing_ok=True)

    def get_transport_name(self) -> str:
        return self._transport

    @classmethod
    def generate_communicator_id(cls) -> str:
        return "one"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class RefusesToStart(RaysGroup):
    """Its `initialize` fails."""

    def initialize(self, rank: int) -> None:
        raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")


class NeverStarts(RaysGroup):
    """Its `initialize` waits for what never comes."""

    def initialize(self, rank: int) -> None:
        threading.Event().wait()


class SendsNothing(RaysGroup):
    """As Ray's CPU communicator does it: there is no transfer behind `send` and `recv`."""

    def send(self, value: Any, peer_rank: int) -> None: ...

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        return None


class SendsAnother(RaysGroup):
    """Gives a tensor of another shape, and one of its own where the shape is right."""

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> torch.Tensor:
        buffer = super().recv(shape, dtype, peer_rank, lambda shape, dtype: torch.empty(shape, dtype=dtype))
        return buffer[1:] if int(buffer[0]) == 3 else buffer


class FailsAt(RaysGroup):
    """A `send` that fails at value 3."""

    def send(self, value: Any, peer_rank: int) -> None:
        if int(value[0]) == 3:
            raise RuntimeError("the cable is out")
        super().send(value, peer_rank)


class SlowToSend(RaysGroup):
    """A `send` that takes its time, and only then looks at the tensor."""

    def send(self, value: Any, peer_rank: int) -> None:
        time.sleep(0.05)
        super().send(value, peer_rank)


class Unpicklable(RaysGroup):
    """Holds what cannot go to an actor."""

    def __init__(self, handles: list[Any]) -> None:
        super().__init__(handles)
        self.lock = threading.Lock()


class BadRanks(RaysGroup):
    """Gives every actor one rank."""

    def get_rank(self, actor: Any) -> int:
        return 7
