"""A communicator between processes over gloo (`torch.distributed`), for CPU tensors of any dtype.

    store = torch.distributed.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)
    link = GlooCommunicator(store, "link 0", rank, size=2)
    link.warm_up(limit_s=30)

It makes a process group of its own and leaves `torch.distributed`'s default group alone. Each transfer begins with a header that
says dtype and shape, so a receiver that expects something else gets an error instead of bytes it takes for something else.

A thread per peer waits for a message that never comes: its connection breaks when the peer's process ends or aborts, and that
ends all waits here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed

from raycomm.device.base import OwnStream, Shape, shape_text
from raycomm.device.checks import about, check_buffer, check_dimension, check_parts, check_peer, check_stream, check_tensor, who
from raycomm.device.combining import combine
from raycomm.device.communicator import Received, Use, chosen_stream
from raycomm.device.cpu import CpuDevice, CpuEvent, CpuStream
from raycomm.errors import (
    CollectiveError,
    CommunicatorClosedError,
    CommunicatorError,
    PeerDiedError,
    RankMissingError,
    TensorMismatchError,
)

dist: Any = torch.distributed  # Its type stubs leave out most of what is used here.
_Gloo: TypeAlias = Any

_HEADER_BYTES = 1536  # Room for the sizes of 64 dimensions, torch's limit.
_DATA, _WATCH, _ABORT = 0, 1, 2  # Tags.
# Gloo breaks all connections of a group when a wait passes its limit, so its waits have none; events have.
_NO_LIMIT = timedelta(days=365)
_SETUP_S = 60.0  # For the first operation of a communicator that was not warmed up.


class GlooCommunicator:
    """A rank's end. See `raycomm.device.Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks reach; not closed here.
        name: unique among the communicators that use the store.
        address: of this host, as the others reach it.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        *,
        device: CpuDevice | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        if not 0 <= rank < size:
            raise CommunicatorError(f"{name} has ranks 0 to {size - 1}, was given {rank}", communicator=name, rank=rank)
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device or CpuDevice()
        self._store: Any = dist.PrefixStore(f"raycomm {name}", store)
        self._address = address
        self._own = self.device.stream(f"{name} at rank {rank}")
        self._group: _Gloo | None = None
        self._last: CpuEvent | None = None
        self._failure: CommunicatorError | None = None
        self._lock = threading.Lock()

    def warm_up(self, limit_s: float) -> None:
        """Meet all others. See the interface."""
        self.poll()
        if self._group is not None:
            return
        end = time.monotonic() + limit_s
        missing = self._meet("there", end)
        if not missing:
            made: list[Any] = []
            thread = threading.Thread(target=self._connect, args=(limit_s, made), name=f"raycomm set-up {self.name}", daemon=True)
            thread.start()
            thread.join(max(0.0, end - time.monotonic()))
            connected = bool(made) and isinstance(made[0], dist.ProcessGroupGloo)
            # Nobody goes on, and perhaps away again, while another one still connects.
            missing = self._meet("connected", end) if connected else tuple(rank for rank in range(self.size) if rank != self.rank)
        if not missing:
            self._group = made[0]
            self._store = None  # it is a connection
            self._watch()
            return
        ranks = ", ".join(map(str, missing))
        text = (
            f"{who(self)} waited {limit_s} s in vain for rank {ranks}; see whether its process runs and reaches {self._address}"
        )
        raise self._broke(RankMissingError(text, limit_s=limit_s, missing=missing, waits_for=f"rank {ranks}", **about(self)))

    def send(self, tensor: torch.Tensor, peer: int, *, stream: OwnStream | None = None) -> CpuEvent:
        """Launch a send. See the interface."""
        check_peer(self, peer)
        check_tensor(self, tensor, peer)
        header, data = _header(tensor), _bytes(tensor)

        def work(group: _Gloo) -> None:
            _send(group, header, peer)
            if data.numel():
                _send(group, data, peer)

        return self._launch(f"send to rank {peer} on {self.name}", Use.SEND, stream, work, peer)

    def recv(
        self,
        shape: Shape,
        dtype: torch.dtype,
        peer: int,
        *,
        stream: OwnStream | None = None,
        into: torch.Tensor | None = None,
    ) -> Received:
        """Launch a receive. See the interface."""
        check_peer(self, peer)
        if into is not None:
            check_buffer(self, into, shape, dtype, peer)
        tensor = torch.empty(shape, dtype=dtype, device="cpu") if into is None else into

        def work(group: _Gloo) -> None:
            header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
            _recv(group, header, peer)
            size, sent = _parsed(header)
            expected = shape_text(shape, dtype)
            if sent != expected:
                if size:
                    _recv(group, torch.empty(size, dtype=torch.uint8, device="cpu"), peer)
                text = f"{who(self)} receives {expected} from rank {peer}, which sent {sent}"
                raise TensorMismatchError(text, expected=expected, given=sent, **about(self, peer))
            if size:
                _recv(group, _bytes(tensor), peer)

        return Received(tensor, self._launch(f"receive from rank {peer} on {self.name}", Use.RECV, stream, work, peer))

    def allreduce(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch an allreduce. See the interface."""
        return self._collective("allreduce", tensor, tuple(tensor.shape), stream, op=str(op))

    def allgather(self, tensor: torch.Tensor, *, stream: OwnStream | None = None) -> Received:
        """Launch an allgather. See the interface."""
        check_dimension(self, tensor)
        return self._collective("allgather", tensor, (tensor.shape[0] * self.size, *tensor.shape[1:]), stream)

    def reducescatter(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch a reducescatter. See the interface."""
        check_parts(self, tensor)
        return self._collective("reducescatter", tensor, (tensor.shape[0] // self.size, *tensor.shape[1:]), stream, op=str(op))

    def broadcast(self, tensor: torch.Tensor, root: int, *, stream: OwnStream | None = None) -> Received:
        """Launch a broadcast. See the interface."""
        if root != self.rank:
            check_peer(self, root)
            check_buffer(self, tensor, tuple(tensor.shape), tensor.dtype, root)
        check_tensor(self, tensor)
        what, mine, data = f"broadcast on {self.name}", _header(tensor, f"broadcast from rank {root}"), _bytes(tensor)

        def work(group: _Gloo) -> None:
            self._check_headers(_gather(group, mine, self.size), mine, what)
            if data.numel():
                options = dist.distributed_c10d.BroadcastOptions()
                options.rootRank, options.rootTensor, options.timeout = root, 0, _NO_LIMIT
                group.broadcast([data], options).wait(_NO_LIMIT)

        return Received(tensor, self._launch(what, Use.COLLECTIVE, stream, work, None))

    def poll(self) -> None:
        """Raise what has gone wrong. See the interface."""
        if self._failure is not None:
            raise self._failure.fresh()

    def abort(self, limit_s: float) -> None:
        """End all operations. See the interface."""
        self._broke(CommunicatorClosedError(f"{who(self)} aborted the communicator", **about(self)))
        if self._group is not None and self.size > 1:
            thread = threading.Thread(target=self._break, args=(self._group,), name=f"raycomm abort {self.name}", daemon=True)
            thread.start()
            thread.join(limit_s)

    def _check_headers(self, headers: Sequence[torch.Tensor], mine: torch.Tensor, what: str) -> tuple[str, ...]:
        """Raise `CollectiveError` if the ranks mean different things; else what each of them gives."""
        texts = tuple(f"rank {rank}: {_parsed(header)[1]}" for rank, header in enumerate(headers))
        if any(not torch.equal(header, mine) for header in headers):
            text = f"the parts in a collective on {self.name} do not fit together: {'; '.join(texts)}"
            raise CollectiveError(text, collective=what, tensors=texts)
        return texts

    def _collective(
        self,
        kind: str,
        tensor: torch.Tensor,
        shape: Shape,
        stream: OwnStream | None,
        op: str | None = None,
    ) -> Received:
        check_tensor(self, tensor)
        out = torch.empty(shape, dtype=tensor.dtype, device="cpu")
        mine, data = _header(tensor, f"{kind} {op}"), _bytes(tensor)

        def work(group: _Gloo) -> None:
            texts = self._check_headers(_gather(group, mine, self.size), mine, f"{kind} on {self.name}")
            parts = _gather(group, data, self.size) if data.numel() else [data] * self.size
            try:
                result = combine(kind, op, None, self.rank, [part.view(tensor.dtype).view(tensor.shape) for part in parts])
            except (ValueError, RuntimeError, TypeError) as error:  # The operation is not for this dtype: so at all ranks.
                text = f"{kind} on {self.name} with {op} of {texts[0]}: {error}"
                raise CollectiveError(text, collective=f"{kind} on {self.name}", tensors=texts) from error
            out.copy_(result)

        return Received(out, self._launch(f"{kind} on {self.name}", Use.COLLECTIVE, stream, work, None))

    def _launch(
        self,
        what: str,
        use: Use,
        stream: OwnStream | None,
        work: Callable[[_Gloo], None],
        peer: int | None,
    ) -> CpuEvent:
        """Put `work` into the stream, after what was launched before it on this communicator."""
        on: CpuStream = chosen_stream(self, use, self._own) if stream is None else stream
        check_stream(self, on, peer)
        if self._group is None:
            self.warm_up(_SETUP_S)
        self.poll()
        before = self._last

        def turn() -> None:
            if before is not None:
                before.wait()
            self.poll()
            assert self._group is not None
            try:
                work(self._group)
            except (CommunicatorError, CollectiveError):  # all ranks raise the latter, at one point
                raise
            except RuntimeError as error:
                ranks = "a rank" if peer is None else f"rank {peer}"
                text = f"{what} at {who(self)}: {ranks} is gone, its process ended or aborted ({_first_line(error)})"
                raise self._broke(PeerDiedError(text, **about(self, peer))) from error
            except Exception as error:  # somewhere in the middle: nobody knows what the peer has got
                text = f"{what} at {who(self)} failed under way: {type(error).__name__}: {error}"
                failure = self._broke(CommunicatorError(text, **about(self, peer)))
                self._break(self._group)
                raise failure from error

        self._last = on.launch(what, turn)
        return self._last

    def _meet(self, stage: str, end: float) -> tuple[int, ...]:
        """Say in the store how far this rank is; the ranks that had not come so far by `end`."""
        try:
            self._store.set(f"{stage} {self.rank}", "")
            while missing := tuple(rank for rank in range(self.size) if not self._store.check([f"{stage} {rank}"])):
                self.poll()  # aborted by another thread
                if time.monotonic() >= end:
                    return missing
                time.sleep(0.005)
        except (RuntimeError, ValueError) as error:
            text = f"{who(self)} cannot reach the store of the group, its process may have ended ({_first_line(error)})"
            raise self._broke(CommunicatorClosedError(text, **about(self))) from error
        return ()

    def _connect(self, limit_s: float, made: list[Any]) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=max(1.0, limit_s))
        try:
            made.append(dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), self.rank, self.size, options))
        except RuntimeError as error:
            made.append(error)

    def _watch(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                threading.Thread(target=self._watch_peer, args=(peer,), name=f"raycomm watch {peer}", daemon=True).start()

    def _watch_peer(self, peer: int) -> None:
        assert self._group is not None
        try:
            self._group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, _WATCH).wait(_NO_LIMIT)
        except RuntimeError as error:
            text = f"rank {peer} of {self.name} is gone, as {who(self)} sees: its process ended or aborted ({_first_line(error)})"
            self._broke(PeerDiedError(text, **about(self, peer)))
            self._break(self._group)

    def _break(self, group: _Gloo) -> None:
        """Break all connections of this rank, which ends all its waits: what gloo does when a wait passes its limit."""
        peer = (self.rank + 1) % self.size
        try:
            group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, _ABORT).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass

    def _broke(self, error: CommunicatorError) -> CommunicatorError:
        """Remember the first failure; what to raise."""
        with self._lock:
            self._failure = self._failure or error.fresh()
            return self._failure.fresh()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _header(tensor: torch.Tensor, what: str = "") -> torch.Tensor:
    """Bytes that follow, dtype and shape, and what is done with them."""
    size = tensor.element_size() * math.prod(tensor.shape)
    text = (
        f"{size} {what} {shape_text(tensor.shape, tensor.dtype)}" if what else f"{size} {shape_text(tensor.shape, tensor.dtype)}"
    )
    return torch.frombuffer(bytearray(text.encode().ljust(_HEADER_BYTES)), dtype=torch.uint8)


def _parsed(header: torch.Tensor) -> tuple[int, str]:
    """How many bytes follow, and the rest of the text."""
    size, _, rest = bytes(header.tolist()).decode().rstrip().partition(" ")
    return int(size), rest


def _send(group: _Gloo, data: torch.Tensor, peer: int) -> None:
    group.send([data], peer, _DATA).wait(_NO_LIMIT)


def _recv(group: _Gloo, data: torch.Tensor, peer: int) -> None:
    group.recv([data], peer, _DATA).wait(_NO_LIMIT)


def _gather(group: _Gloo, data: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    parts = [torch.empty_like(data) for _ in range(size)]
    options = dist.distributed_c10d.AllgatherOptions()
    options.timeout = _NO_LIMIT
    group.allgather([parts], [data], options).wait(_NO_LIMIT)
    return parts


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
