"""Communicators over NCCL, through cupy, between processes with a GPU each. Tensors never touch the host.

A gloo group of the same ranks comes with each communicator: it is where the ranks meet, where rank 0 says NCCL's unique id, and
how the death of a rank is noticed. NCCL itself does not notice it where ranks share a host: its kernel waits on for memory that
nobody writes any more.

NCCL compares nothing: a receive that is launched with another size than its send, and collectives of tensors that differ, hang or
mix up memory. Whoever launches makes sure of that; a graph does, with its control records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raycomm.device.base import OwnStream, Shape, shape_text
from raycomm.device.checks import about, check_buffer, check_dimension, check_parts, check_peer, check_stream, check_tensor, who
from raycomm.device.combining import combine
from raycomm.device.communicator import Received, Use, chosen_stream
from raycomm.device.cuda import CudaDevice, CudaEvent, CudaStream
from raycomm.device.gloo import GlooCommunicator
from raycomm.errors import (
    CollectiveError,
    CommunicatorClosedError,
    CommunicatorError,
    RankMissingError,
)

_SETUP_S = 60.0  # For the first operation of a communicator that was not warmed up.
_WHY_S = 0.5
_USED_S = 0.2
# By names of cupy's constants, which are NCCL's numbers. What is not here is combined from the tensors of all ranks.
_OPS = {"sum": "NCCL_SUM", "product": "NCCL_PROD", "min": "NCCL_MIN", "max": "NCCL_MAX", "avg": "NCCL_AVG"}
_DTYPES = {
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}


class NcclCommunicator:
    """A rank's end. See `raycomm.device.Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks reach; not closed here.
        name: unique among the communicators that use the store.
        address: of this host, as the others reach it.
        library: cupy's binding of NCCL; None: `cupy.cuda.nccl`.
        before_abort: called with the reason, perhaps by several threads and more than once, when this communicator has failed
            and before its transfers are ended.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        *,
        device: CudaDevice,
        address: str = "127.0.0.1",
        library: Any = None,
        before_abort: Callable[[CommunicatorError], object] | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self._group = GlooCommunicator(store, name, rank, size, address=address)
        self._nccl = library
        self._before_abort = before_abort
        self._own = device.stream(f"{name} at rank {rank}")
        self._made: Any = None  # by NCCL, and not yet known to work
        self._comm: Any = None
        self._failure: CommunicatorError | None = None
        self._lock = threading.Lock()
        self._using = threading.Lock()  # while NCCL's communicator is called, so that it is not freed meanwhile
        self._last: tuple[CudaStream, CudaEvent] | None = None

    def warm_up(self, limit_s: float) -> None:
        """Meet all others, and run each kind of transfer once. See the interface."""
        self.poll()
        if self._comm is not None:
            return
        end = time.monotonic() + limit_s
        try:
            self._group.warm_up(limit_s)
        except CommunicatorError as error:
            raise self._broke(self._of_group(error)) from None
        made: list[Any] = []
        thread = threading.Thread(target=self._set_up, args=(made, end), name=f"raycomm set-up {self.name}", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < end:
            thread.join(min(0.1, max(0.0, end - time.monotonic())))
            self._poll_group()
        if not made:
            text = f"{who(self)} waited {limit_s} s in vain for NCCL to connect its {self.size} ranks, all of which have come"
            text += "; run with NCCL_DEBUG=INFO"
            raise self._broke(RankMissingError(text, limit_s=limit_s, missing=(), waits_for="NCCL", **about(self)))
        if isinstance(made[0], Exception):
            raise self._broke(self._as_ours("set-up", made[0]))
        self._comm = made[0]

    def send(self, tensor: torch.Tensor, peer: int, *, stream: OwnStream | None = None) -> CudaEvent:
        """Launch a send. See the interface."""
        check_peer(self, peer)
        check_tensor(self, tensor, peer)
        on = self._stream(Use.SEND, stream, peer)
        data = self._data(tensor, on)

        def launch(comm: Any, handle: int) -> None:
            comm.send(data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, peer, handle)

        return self._launch(f"send to rank {peer} on {self.name}", on, (data,), launch, peer)

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
        on = self._stream(Use.RECV, stream, peer)
        tensor = self.device.allocate(shape, dtype, on) if into is None else into
        data = _bytes(tensor)

        def launch(comm: Any, handle: int) -> None:
            comm.recv(data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, peer, handle)

        return Received(tensor, self._launch(f"receive from rank {peer} on {self.name}", on, (data,), launch, peer))

    def allreduce(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch an allreduce. See the interface."""
        return self._reduce("allreduce", tensor, tuple(tensor.shape), str(op), stream)

    def reducescatter(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch a reducescatter. See the interface."""
        check_parts(self, tensor)
        return self._reduce("reducescatter", tensor, (tensor.shape[0] // self.size, *tensor.shape[1:]), str(op), stream)

    def allgather(self, tensor: torch.Tensor, *, stream: OwnStream | None = None) -> Received:
        """Launch an allgather. See the interface."""
        check_tensor(self, tensor)
        check_dimension(self, tensor)
        on = self._stream(Use.COLLECTIVE, stream, None)
        out = self.device.allocate((tensor.shape[0] * self.size, *tensor.shape[1:]), tensor.dtype, on)
        return Received(out, self._gather("allgather", tensor, out, on))

    def broadcast(self, tensor: torch.Tensor, root: int, *, stream: OwnStream | None = None) -> Received:
        """Launch a broadcast. See the interface."""
        if root != self.rank:
            check_peer(self, root)
            check_buffer(self, tensor, tuple(tensor.shape), tensor.dtype, root)
        check_tensor(self, tensor)
        on = self._stream(Use.COLLECTIVE, stream, None)
        data = self._data(tensor, on) if root == self.rank else _bytes(tensor)

        def launch(comm: Any, handle: int) -> None:
            comm.broadcast(data.data_ptr(), data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, root, handle)

        return Received(tensor, self._launch(f"broadcast on {self.name}", on, (data,), launch, None))

    @property
    def failure(self) -> CommunicatorError | None:
        """What is known to have gone wrong. Set before NCCL's communicator is aborted."""
        return self._failure

    def poll(self) -> None:
        """Raise what has gone wrong. See the interface."""
        if self._failure is not None:
            raise self._failure.fresh()
        self._poll_group()
        # Not behind a launch that blocks: who polls is to find out why it does, and end it.
        self._check(wait=False)

    def check(self) -> None:
        """Raise what NCCL says of transfers that have failed."""
        self._check(wait=True)

    def _check(self, *, wait: bool) -> None:
        if not self._using.acquire(blocking=wait):
            return
        wrong: Exception | None = None
        try:
            if self._comm is not None and self._made is not None:
                self._comm.check_async_error()
        except Exception as error:  # cupy knows some errors of NCCL by number only, and stumbles
            wrong = error
        finally:
            self._using.release()
        if wrong is not None:
            raise self._broke(self._late(wrong, "a transfer")) from wrong

    def abort(self, limit_s: float) -> None:
        """End all operations. See the interface."""
        self._broke(CommunicatorClosedError(f"{who(self)} aborted the communicator", **about(self)), limit_s)
        self._group.abort(limit_s)

    def _reduce(self, kind: str, tensor: torch.Tensor, shape: Shape, op: str, stream: OwnStream | None) -> Received:
        check_tensor(self, tensor)
        on = self._stream(Use.COLLECTIVE, stream, None)
        average_of_integers = op == "avg" and not tensor.is_floating_point()
        known = tensor.dtype in _DTYPES and hasattr(self._nccl, _DTYPES[tensor.dtype])
        if average_of_integers or op not in _OPS or not known:
            return self._combine(kind, tensor, shape, op, on)
        out = self.device.allocate(shape, tensor.dtype, on)
        data = self._data(tensor, on)

        def launch(comm: Any, handle: int) -> None:
            dtype, how = getattr(self._nccl, _DTYPES[tensor.dtype]), getattr(self._nccl, _OPS[op])
            run = comm.allReduce if kind == "allreduce" else comm.reduceScatter
            run(data.data_ptr(), out.data_ptr(), out.numel(), dtype, how, handle)

        return Received(out, self._launch(f"{kind} on {self.name}", on, (data, out), launch, None))

    def _combine(self, kind: str, tensor: torch.Tensor, shape: Shape, op: str, on: CudaStream) -> Received:
        """What NCCL has no operation for: gather, then combine on the device, in order of rank."""
        whole = self.device.allocate((self.size, *tensor.shape), tensor.dtype, on)
        try:
            combine(kind, op, None, self.rank, [torch.empty((self.size,), dtype=tensor.dtype, device="cpu")] * self.size)
        except (ValueError, RuntimeError, TypeError) as error:  # the operation is not for this dtype
            text = f"{kind} on {self.name} with {op} of {shape_text(tensor.shape, tensor.dtype)}: {error}"
            raise CollectiveError(text, collective=f"{kind} on {self.name}") from error
        self._gather(kind, tensor, whole, on)
        out = self.device.allocate(shape, tensor.dtype, on)
        self.device.run(on, lambda: out.copy_(combine(kind, op, None, self.rank, list(whole))))
        return Received(out, on.mark(f"{kind} on {self.name}", self))

    def _gather(self, kind: str, tensor: torch.Tensor, out: torch.Tensor, on: CudaStream) -> CudaEvent:
        data, into = self._data(tensor, on), _bytes(out)

        def launch(comm: Any, handle: int) -> None:
            comm.allGather(data.data_ptr(), into.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, handle)

        return self._launch(f"{kind} on {self.name}", on, (data, into), launch, None)

    def _stream(self, use: Use, stream: OwnStream | None, peer: int | None) -> CudaStream:
        """The stream to launch on, of a communicator that is ready."""
        on: CudaStream = chosen_stream(self, use, self._own) if stream is None else stream
        check_stream(self, on, peer)
        if self._comm is None:
            self.warm_up(_SETUP_S)
        self.poll()
        return on

    def _data(self, tensor: torch.Tensor, on: CudaStream) -> torch.Tensor:
        """Bytes to send: the memory of the tensor; where torch keeps it conjugated or negated, a copy made on the stream."""
        if tensor.is_conj() or tensor.is_neg():
            plain = self.device.allocate(tuple(tensor.shape), tensor.dtype, on)
            self.device.run(on, lambda: plain.copy_(tensor.detach()))
            self.device.record_stream(tensor, on)
            return _bytes(plain)
        return _bytes(tensor)

    def _launch(
        self,
        what: str,
        on: CudaStream,
        kept: Sequence[torch.Tensor],
        launch: Callable[[Any, int], None],
        peer: int | None,
    ) -> CudaEvent:
        """Put a transfer into the stream, after what was launched before it on this communicator: NCCL itself orders only what is
        launched on one stream. Empty tensors are no transfer."""
        if self._last is not None and self._last[0] is not on:
            on.wait(self._last[1])
        if all(tensor.numel() for tensor in kept):
            try:
                with self.device.selected(), self._using:
                    if self._made is None:
                        raise RuntimeError("the communicator is aborted")
                    launch(self._comm, on.handle)
            except Exception as error:
                raise self._broke(self._late(error, what, peer)) from error
            for tensor in kept:
                self.device.record_stream(tensor, on)
        event = on.mark(what, self)
        self._last = on, event
        return event

    def _set_up(self, made: list[Any], end: float) -> None:
        """In a thread that may be left behind: NCCL's calls have no limit of their own."""
        try:
            if self._nccl is None:
                from cupy.cuda import nccl

                self._nccl = nccl
            with self.device.selected():
                comm = self._nccl.NcclCommunicator(self.size, self._unique_id(end), self.rank)
                with self._lock:
                    self._made, too_late = comm, self._failure is not None
                if too_late:
                    comm.abort()
                    return
                self._warm(comm, end)
            made.append(comm)
        except Exception as error:
            made.append(error)

    def _unique_id(self, end: float) -> Any:
        """Rank 0's, in the form that the cupy of this rank takes: bytes, and before cupy 14 a tuple of signed numbers."""
        own = self._nccl.get_unique_id()
        raw = own if isinstance(own, bytes) else bytes(number & 0xFF for number in own)
        shared = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        came = self._group.broadcast(shared, 0)
        came.event.synchronize(max(0.0, end - time.monotonic()))
        raw = bytes(came.tensor.tolist())
        return raw if isinstance(own, bytes) else tuple(number - 256 if number > 127 else number for number in raw)

    def _warm(self, comm: Any, end: float) -> None:
        """Each kind of transfer once: NCCL connects ranks when they first need it, and then blocks the host."""
        n = self._nccl
        room = self.device.allocate((2 * self.size,), torch.uint8, self._own)
        one, all_, handle = room.data_ptr(), room.data_ptr() + self.size, self._own.handle
        comm.allReduce(one, all_, 1, n.NCCL_UINT8, n.NCCL_SUM, handle)
        comm.allGather(one, all_, 1, n.NCCL_UINT8, handle)
        comm.reduceScatter(one, all_, 1, n.NCCL_UINT8, n.NCCL_SUM, handle)
        comm.broadcast(one, all_, 1, n.NCCL_UINT8, 0, handle)
        n.groupStart()
        try:
            for peer in range(self.size):
                if peer != self.rank:
                    comm.send(one, 1, n.NCCL_UINT8, peer, handle)
                    comm.recv(all_ + peer, 1, n.NCCL_UINT8, peer, handle)
        finally:
            n.groupEnd()
        self._own.record().synchronize(max(0.0, end - time.monotonic()))

    def _poll_group(self) -> None:
        try:
            self._group.poll()
        except CommunicatorError as error:
            raise self._broke(self._of_group(error)) from None

    def _of_group(self, error: CommunicatorError) -> CommunicatorError:
        """What the gloo group says, of this communicator."""
        return type(error)(f"{who(self)}: {error}", **{**error.attributes, **about(self, error.peer)})

    def _late(self, error: Exception, what: str, peer: int | None = None) -> CommunicatorError:
        """NCCL says that something failed, not why. That a rank has died the group says, if perhaps a moment later."""
        end = time.monotonic() + _WHY_S
        while time.monotonic() < end:
            try:
                self._group.poll()
            except CommunicatorError as why:
                return self._of_group(why)
            time.sleep(0.005)
        return self._as_ours(what, error, peer)

    def _as_ours(self, what: str, error: Exception, peer: int | None = None) -> CommunicatorError:
        if isinstance(error, CommunicatorError):
            return error
        text = f"{what} at {who(self)}: {type(error).__name__}: {error}; run with NCCL_DEBUG=INFO to see what NCCL says"
        return CommunicatorError(text, **about(self, peer))

    def _broke(self, error: CommunicatorError, limit_s: float = 0.0) -> CommunicatorError:
        """Remember the first failure, and end what is under way; what to raise. Waits for at most `limit_s` seconds."""
        with self._lock:
            self._failure = self._failure or error.fresh()
        if self._before_abort is not None:
            self._before_abort(self._failure)  # always: whoever comes second waits for it, too
        # Not under the hands of who launches or looks. NCCL's calls return at once but for set-up; one that does not is no
        # reason to wait for ever.
        held = self._using.acquire(timeout=_USED_S)
        with self._lock:
            comm, self._made = self._made, None
        if held:
            self._using.release()
        if comm is not None:
            thread = threading.Thread(target=comm.abort, name=f"raycomm abort {self.name}", daemon=True)
            thread.start()
            thread.join(limit_s)
        return self._failure.fresh()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)
