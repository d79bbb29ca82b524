"""An object of Ray's `Communicator`, as communicators of raycomm's.

    whole = RayCommunicator(theirs, rank, "communicator 0 of graph 'g'")
    whole.initialize()
    link = whole.part("link 3", ranks=(0, 2))

All its parts are one sequence of operations, which one thread calls, from `initialize` on: what a class keeps per thread, such as
the current GPU, is there in each of its methods. Nothing waits on a device: whoever made a tensor on a GPU is waited for on the
host, then the call is made, then the stream is waited for that the object says it uses. On tensors of host memory a call is over
when it returns.

It moves tensors of the actor's GPU, where torch finds one and the object does not call its transport "cpu"; else those of host
memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from ray.experimental.util.types import ReduceOp

from raycomm.device.base import OwnStream, Shape, shape_text
from raycomm.device.checks import about, check_buffer, check_dimension, check_parts, check_peer, check_stream, check_tensor, who
from raycomm.device.communicator import Received, Use, chosen_stream
from raycomm.device.cpu import CpuEvent
from raycomm.device.host_ordered import CallThread, HostOrdered, HostStream
from raycomm.errors import CommunicatorClosedError, CommunicatorError, TensorMismatchError

logger = logging.getLogger("raycomm")

_CPU = "cpu"


class RayCommunicator:
    """The whole of it, at one rank.

    Three waits here know no limit, for the object's own `initialize` and `destroy` end when they like. They are in daemon threads
    that nobody waits for without one: the actor's set-up, which the driver gives up, and the thread that `destroy` starts.

    Args:
        theirs: the object.
        rank: of this process in it.
        name: for messages.
        gpu: to use, such as ``cuda:0``; None: the one that torch uses on this thread.
    """

    def __init__(self, theirs: Any, rank: int, name: str, gpu: str | None = None) -> None:
        self.theirs = theirs
        self.rank = rank
        self.name = name
        on_gpu = torch.cuda.is_available() and theirs.get_transport_name() != _CPU
        place = torch.device(gpu or f"cuda:{torch.cuda.current_device()}") if on_gpu else torch.device(_CPU)
        self._calls = CallThread(name, place)
        self.device = HostOrdered(str(place), place, self._calls)
        self._failure: CommunicatorError | None = None
        self._lock = threading.Lock()
        self._destroying: threading.Thread | None = None

    def initialize(self) -> None:
        """Call it as Ray does, once per process. Blocks for as long as the object likes."""
        done = self._calls.call(lambda: self.theirs.initialize(self.rank))
        done.wait()
        if done.failure is not None:
            text = f"{self.name}: initialize({self.rank}) failed with {type(done.failure).__name__}: {done.failure}"
            raise self.broke(CommunicatorError(text, communicator=self.name, rank=self.rank)) from done.failure

    def part(self, name: str, ranks: Sequence[int]) -> RayPart:
        """The communicator of some of its ranks, in this order."""
        return RayPart(self, name, tuple(ranks))

    def poll(self) -> None:
        """Raise what has gone wrong."""
        if self._failure is not None:
            raise self._failure.fresh()

    def broke(self, error: CommunicatorError) -> CommunicatorError:
        """Remember the first failure; what to raise."""
        with self._lock:
            self._failure = self._failure or error.fresh()
            return self._failure.fresh()

    def destroy(self, limit_s: float) -> None:
        """Call its `destroy`, once, and wait for it for `limit_s` seconds at most.

        On the thread of its other calls, unless that is in the middle of one, which this is to end; but after `initialize`.
        """
        with self._lock:
            if self._destroying is None:
                self._destroying = threading.Thread(target=self._destroy, name=f"raycomm destroy {self.name}", daemon=True)
                self._destroying.start()
        self._destroying.join(limit_s)

    def _destroy(self) -> None:
        self._calls.first.wait()  # however late: what it has made is not to stay
        destroyed = self._calls.call_if_idle(self._call_destroy)
        if destroyed is None:
            self._call_destroy()
        else:
            destroyed.wait()
        self._calls.stop()

    def _call_destroy(self) -> None:
        try:
            self.theirs.destroy()
        except BaseException:  # it may be in the middle of a transfer, which this is to end
            logger.warning("%s: destroy failed; what it holds may stay until its process ends", self.name, exc_info=True)


class RayPart:
    """Some ranks of it. See `raycomm.device.Communicator`.

    Args:
        whole: initialized when this is used.
        ranks: those in `whole`, by rank here; this process's among them.
    """

    def __init__(self, whole: RayCommunicator, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.rank = ranks.index(whole.rank)
        self.size = len(ranks)
        self._whole = whole
        self._theirs = whole.theirs
        self._ranks = ranks

    @property
    def device(self) -> HostOrdered:
        """Where its tensors lie."""
        return self._whole.device

    def warm_up(self, limit_s: float) -> None:
        """Nothing to do: Ray's interface has `initialize`."""
        self.poll()

    def send(self, tensor: torch.Tensor, peer: int, *, stream: OwnStream | None = None) -> CpuEvent:
        """Launch a send. See the interface."""
        check_peer(self, peer)
        check_tensor(self, tensor, peer)
        plain = _plain(tensor)

        def work() -> None:
            if plain.numel():
                self._theirs.send(plain, self._ranks[peer])

        return self._launch(f"send to rank {peer}", Use.SEND, stream, work, peer)

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
        buffer = self.device.empty(shape, dtype) if into is None else into

        def work() -> None:
            self._receive(buffer, peer)

        return Received(buffer, self._launch(f"receive from rank {peer}", Use.RECV, stream, work, peer))

    def allreduce(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch an allreduce. See the interface; the object says what it does about unequal tensors."""
        return self._collective("allreduce", tensor, tuple(tensor.shape), stream, ReduceOp[str(op).upper()])

    def allgather(self, tensor: torch.Tensor, *, stream: OwnStream | None = None) -> Received:
        """Launch an allgather. See the interface."""
        check_dimension(self, tensor)
        return self._collective("allgather", tensor, (tensor.shape[0] * self.size, *tensor.shape[1:]), stream)

    def reducescatter(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch a reducescatter. See the interface."""
        check_parts(self, tensor)
        shape = (tensor.shape[0] // self.size, *tensor.shape[1:])
        return self._collective("reducescatter", tensor, shape, stream, ReduceOp[str(op).upper()])

    def broadcast(self, tensor: torch.Tensor, root: int, *, stream: OwnStream | None = None) -> Received:
        """Launch a broadcast: sends, since Ray's interface has no other. See the interface."""
        if root != self.rank:
            check_peer(self, root)
            check_buffer(self, tensor, tuple(tensor.shape), tensor.dtype, root)
        check_tensor(self, tensor)
        plain = _plain(tensor)

        def work() -> None:
            if self.rank != root:
                self._receive(tensor, root)
                return
            for rank in self._ranks:
                if rank != self._whole.rank and plain.numel():
                    self._theirs.send(plain, rank)

        use = Use.SEND if self.rank == root else Use.RECV
        return Received(tensor, self._launch("broadcast", use, stream, work, None))

    def poll(self) -> None:
        """Raise what has gone wrong, on this part or another one. See the interface."""
        self._whole.poll()

    def abort(self, limit_s: float) -> None:
        """End it, with all its parts. See the interface."""
        self._whole.broke(CommunicatorClosedError(f"{who(self)} aborted the communicator", **about(self)))
        self._whole.destroy(limit_s)

    def _receive(self, buffer: torch.Tensor, peer: int) -> None:
        if not buffer.numel():  # nor is anything sent: many libraries take no empty tensor
            return
        came = self._theirs.recv(tuple(buffer.shape), buffer.dtype, self._ranks[peer], lambda shape, dtype: buffer)
        if came is buffer:
            return
        kind = type(self._theirs).__name__
        if not isinstance(came, torch.Tensor):
            text = f"{kind}.recv returned {came!r:.40} at {who(self)}, not the tensor it received from rank {peer}"
            raise CommunicatorError(text, **about(self, peer))
        if came.shape != buffer.shape or came.dtype != buffer.dtype:
            expected, given = shape_text(buffer.shape, buffer.dtype), shape_text(came.shape, came.dtype)
            text = f"{who(self)} receives {expected} from rank {peer}, and {kind}.recv returned {given}"
            raise TensorMismatchError(text, expected=expected, given=given, **about(self, peer))
        buffer.copy_(came)

    def _collective(self, kind: str, tensor: torch.Tensor, shape: Shape, stream: OwnStream | None, *op: Any) -> Received:
        check_tensor(self, tensor)
        out, plain = self.device.empty(shape, tensor.dtype), _plain(tensor)

        def work() -> None:
            if plain.numel():
                getattr(self._theirs, kind)(plain, out, *op)

        return Received(out, self._launch(kind, Use.COLLECTIVE, stream, work, None))

    def _launch(
        self,
        what: str,
        use: Use,
        stream: OwnStream | None,
        work: Callable[[], None],
        peer: int | None,
    ) -> CpuEvent:
        """Put `work` into the stream. What this thread has launched on the GPU so far comes before it."""
        on: HostStream = chosen_stream(self, use, self.device.stream("all")) if stream is None else stream
        check_stream(self, on, peer)
        self.poll()
        whole, device = self._whole, self.device
        made = device.launched()

        def turn() -> None:
            self.poll()
            try:
                device.settle(made, work, partial(_stream_of, self._theirs, use))
                self.poll()  # aborted meanwhile: nobody knows what has come
            except CommunicatorError as error:
                raise whole.broke(error) from None
            except BaseException as error:
                text = f"{what} at {who(self)} failed in {type(self._theirs).__name__}: {type(error).__name__}: {error}"
                raise whole.broke(CommunicatorError(text, **about(self, peer))) from error

        return on.launch(what, turn)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as memory has them: what is evaluated lazily is not to be sent as it lies there."""
    return tensor.detach().resolve_conj().resolve_neg()


def _stream_of(theirs: Any, use: Use) -> AbstractContextManager[Any]:
    """Ray's interface gives a context for each direction; many classes have none, and use the current stream."""
    try:
        stream = theirs.recv_stream if use is Use.RECV else theirs.send_stream
    except NotImplementedError:
        stream = None
    if isinstance(stream, torch.cuda.Stream):
        return torch.cuda.stream(stream)
    return stream if hasattr(stream, "__enter__") else contextlib.nullcontext()
