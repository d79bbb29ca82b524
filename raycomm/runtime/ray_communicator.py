"""An object of Ray's `Communicator`, as communicators of raycomm's.

    whole = RayCommunicator(theirs, rank, "communicator 0 of graph 'g'")
    whole.initialize()
    link = whole.part("link 3", ranks=(0, 2))

All its parts are one sequence of operations. Ray's interface says which calls return before their transfer has ended and which do
not, and classes differ in it, so each call is made on a thread, after the one before, and followed by a wait for the stream that
it says it uses. Nothing here waits on a device: whoever made a tensor on a GPU is waited for on the host, and so is who receives.

It moves tensors of the GPU that torch uses, where torch finds one and the object does not call its transport "cpu"; else those of
host memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ray.experimental.util.types import ReduceOp

from raycomm.device.base import OwnStream, Shape, shape_text
from raycomm.device.checks import about, check_buffer, check_parts, check_peer, check_stream, check_tensor, who
from raycomm.device.communicator import Received, Use, chosen_stream
from raycomm.device.cpu import CpuDevice, CpuEvent, CpuStream
from raycomm.errors import CommunicatorClosedError, CommunicatorError, TensorMismatchError

_CPU = "cpu"
_GPU = "cuda"


class RayCommunicator:
    """The whole of it, at one rank.

    Args:
        theirs: the object; used by one thread at a time.
        rank: of this process in it.
        name: for messages.
    """

    def __init__(self, theirs: Any, rank: int, name: str) -> None:
        self.theirs = theirs
        self.rank = rank
        self.name = name
        self._failure: CommunicatorError | None = None
        self._lock = threading.Lock()
        self._destroyed = False
        self._device: HostOrdered | None = None

    @property
    def device(self) -> HostOrdered:
        """Where its tensors lie."""
        assert self._device is not None, "initialize() comes first"
        return self._device

    def initialize(self) -> None:
        """Call it as Ray does, once per process. Blocks for as long as the object likes."""
        self.theirs.initialize(self.rank)
        on_gpu = torch.cuda.is_available() and self.theirs.get_transport_name() != _CPU
        self._device = HostOrdered(f"{_GPU if on_gpu else _CPU} at rank {self.rank} of {self.name}", _GPU if on_gpu else _CPU)

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
        """Call its `destroy`, once, in a thread that is left behind if it takes longer than `limit_s` seconds."""
        with self._lock:
            if self._destroyed:
                return
            self._destroyed = True

        def run() -> None:
            with contextlib.suppress(Exception):  # it may be in the middle of a transfer, which this is to end
                self.theirs.destroy()

        thread = threading.Thread(target=run, name=f"raycomm destroy {self.name}", daemon=True)
        thread.start()
        thread.join(limit_s)


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
        buffer = self.device.empty(shape, dtype) if into is None else into

        def work() -> None:
            self._receive(buffer, peer)

        return Received(buffer, self._launch(f"receive from rank {peer} on {self.name}", Use.RECV, stream, work, peer))

    def allreduce(self, tensor: torch.Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch an allreduce. See the interface; the object says what it does about unequal tensors."""
        return self._collective("allreduce", tensor, tuple(tensor.shape), stream, ReduceOp[str(op).upper()])

    def allgather(self, tensor: torch.Tensor, *, stream: OwnStream | None = None) -> Received:
        """Launch an allgather. See the interface."""
        if not tensor.shape:
            text = f"allgather at {who(self)} puts tensors one after the other, was given one without dimensions"
            raise TensorMismatchError(text, expected="a dimension", given="none", **about(self))
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
        return Received(tensor, self._launch(f"broadcast on {self.name}", use, stream, work, None))

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

        return Received(out, self._launch(f"{kind} on {self.name}", Use.COLLECTIVE, stream, work, None))

    def _launch(
        self,
        what: str,
        use: Use,
        stream: OwnStream | None,
        work: Callable[[], None],
        peer: int | None,
    ) -> CpuEvent:
        """Put `work` into the stream. What this thread has launched on the GPU so far comes before it."""
        on: CpuStream = chosen_stream(self, use, self.device.stream("all")) if stream is None else stream
        check_stream(self, on, peer)
        self.poll()
        whole, device = self._whole, self.device
        made = device.launched()

        def turn() -> None:
            self.poll()
            try:
                device.settle(made, self._theirs, use, work)
                self.poll()  # aborted meanwhile: nobody knows what has come
            except CommunicatorError as error:
                raise whole.broke(error) from None
            except Exception as error:
                text = f"{what} at {who(self)} failed in {type(self._theirs).__name__}: {type(error).__name__}: {error}"
                raise whole.broke(CommunicatorError(text, **about(self, peer))) from error

        return on.launch(what, turn)


class HostOrdered(CpuDevice):
    """Memory of the host or of the GPU, whose work is ordered by the host: a stream is a thread that waits for each piece."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name)
        self._kind = kind

    def holds(self, tensor: object) -> bool:
        """Whether it is a dense tensor there."""
        return isinstance(tensor, torch.Tensor) and tensor.device.type == self._kind and tensor.layout is torch.strided

    def allocate(self, shape: Shape, dtype: torch.dtype, stream: CpuStream) -> torch.Tensor:
        """Uninitialized memory."""
        return self.empty(shape, dtype)

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory."""
        return torch.empty(shape, dtype=dtype, device=self._kind)

    def launched(self) -> Any:
        """What this thread has launched on the GPU so far; None where there is none."""
        return torch.cuda.current_stream().record_event() if self._kind == _GPU else None

    def settle(self, made: Any, theirs: Any, use: Use, work: Callable[[], None]) -> None:
        """Wait for `made`, call `work` on the stream that `theirs` uses for it, and wait for that."""
        if made is None:
            work()
            return
        made.synchronize()
        with _stream_of(theirs, use):
            work()
            torch.cuda.current_stream().synchronize()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as memory has them: what is evaluated lazily is not to be sent as it lies there."""
    return tensor.detach().resolve_conj().resolve_neg()


def _stream_of(theirs: Any, use: Use) -> Any:
    """Ray's interface gives a context for each direction; many classes have none, and use the current stream."""
    try:
        stream = theirs.recv_stream if use is Use.RECV else theirs.send_stream
    except NotImplementedError:
        stream = None
    if isinstance(stream, torch.cuda.Stream):
        return torch.cuda.stream(stream)
    return stream if hasattr(stream, "__enter__") else contextlib.nullcontext()
