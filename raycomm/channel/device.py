"""The channel between devices: a control record on the ordinary channel, then a transfer on a link for each tensor of the value.

    writer                                          reader
    take the value apart
    write the record ──── ordinary channel ───────► read the record
    launch the sends ──── link, on its stream ────► launch the receives, into fresh buffers
    go on                                           go on; who uses the value waits for the receives' events

The record is one of

    SAME                                     a value of the same structure as the last one: tensors only, with the same metadata
    (structure, metadata, payload, buffers)  else; the last two are the encoded rest of the value, empty where there is none
    a failure                                this execution failed: nothing is launched, and nothing else fails with it

so nothing is received that nobody has sent. Both ends keep the last metadata; messages are neither lost nor read twice, so the
two agree. A tensor whose elements lie densely in memory is sent in that order, and arrives with the same strides.

Where code runs on streams of the link's device (a GPU), no host waits for it: sends wait, on the device, for what makes the
values, and what uses a value for its receives.

A published record is a promise that its tensors follow. Where that fails on either side, the link is aborted: with one transfer
more or less on it, the next value's tensors would arrive in this one's place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from raycomm.channel.base import NO_LIMIT, Reader, Writer
from raycomm.channel.tensors import ONE_TENSOR, Structure, put_together, take_apart
from raycomm.codec import Failure, decode, encode
from raycomm.codec.tensor import is_exact
from raycomm.device import Communicator, Device, Event, Received, Stream
from raycomm.device.base import shape_text
from raycomm.device.checks import about, who
from raycomm.errors import CommunicatorError, SerializationError, TensorMismatchError

SAME: Final = 0
ANY_SIZE: Final = 1 << 62
# On a device. A copy takes a fraction of the time of the transfer, and lets computations go on beside that.
COPIED_UP_TO: Final = 64 << 20
_PLAIN: Final = 0
_REQUIRES_GRAD: Final = 1
_PARAMETER: Final = 2
# dtype without "torch.", shape as sent, the places of the dimensions in it if they are not in order, and flags.
_Metadata: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...] | None, int]


class DeviceWriter:
    """The writing end. Used by one thread.

    Args:
        record: of the ordinary channel that carries the records.
        link: a communicator, used for this direction only.
        peer: the reader's rank in it. In a link of more ranks all others are readers, and values are broadcast.
        stream: of the link's device; transfers are launched on it.
        keeps: whether whoever makes the values never writes to them again.
        static_shape: a promise that the metadata never changes, checked here.
        direct_return: a promise that each value is one tensor, checked here.
        name: of the value, for messages.
        allow_pickle: for the rest of values.

    Attributes:
        lent: the sends of the last value that read its own memory, though its maker, or who is given it, may write to that.
            Before anything does, the maker's stream, or its host, has to wait for them.
    """

    def __init__(
        self,
        record: Writer,
        link: Communicator,
        peer: int,
        stream: Stream,
        *,
        name: str,
        keeps: bool = False,
        static_shape: bool = False,
        direct_return: bool = False,
        allow_pickle: bool = True,
    ) -> None:
        self._record = record
        self._link = link
        self._peer = peer
        self._stream = stream
        self._name = name
        self._keeps = keeps
        self._static_shape = static_shape
        self._direct_return = direct_return
        self._allow_pickle = allow_pickle
        self._last: tuple[Structure, tuple[_Metadata, ...]] | None = None
        self._promised: tuple[_Metadata, ...] | None = None
        self.lent: list[Event] = []
        self._held: deque[tuple[Event, Any]] = deque()

    def write(self, value: Any, timeout: float = NO_LIMIT, after: Sequence[Event] = ()) -> None:
        """Write the record and launch the sends. Blocks while the reader is a whole ring of records behind.

        Unless the maker `keeps` the values, what is sent is a copy of them, made on the host, or by the stream that this thread's
        code runs on now. Large ones on a device with such a stream are not copied, to save memory: see `lent`.

        Args:
            timeout: seconds.
            after: what the sends wait for, where the value is still arriving. It is not copied then, wherever it lies.

        Raises:
            raycomm._core.TimedOut: no room for the record within `timeout` seconds; nothing was published or launched.
            SerializationError, TensorMismatchError: the value cannot be sent, or a promise was broken; nothing was published or
                launched.
            raycomm._core.Closed: the channel was closed.
            CommunicatorError: the link is of no use any more; the record was published.
        """
        structure, tensors, leaves = take_apart(value, self._moves)
        if self._direct_return and structure != ONE_TENSOR:
            raise TensorMismatchError(
                f"{self._name} is promised to be one tensor (_direct_return) and was a {type(value).__name__}; return the tensor "
                "alone, or leave the promise out",
                node=self._name,
                expected="one tensor",
                given=type(value).__name__,
            )
        compute = self._link.device.current_stream() if tensors else None
        copied_up_to = -1 if self._keeps or after else ANY_SIZE if compute is None else COPIED_UP_TO
        flat = [in_one_piece(tensor, copied_up_to) for tensor in tensors]
        metadata = tuple(
            [
                (_name_of(plain.dtype), tuple(plain.shape), order, _flags(tensor))
                for tensor, (plain, order) in zip(tensors, flat, strict=True)
            ]
        )
        self._check_shapes(metadata)
        if flat:
            self._link.poll()
        if not leaves and (structure, metadata) == self._last:
            self._record.write(SAME, timeout)
        else:
            payload, buffers = encode(leaves, allow_pickle=self._allow_pickle) if leaves else (b"", [])
            # Copies that may be written to: what is decoded over them belongs to the reader, as on any channel.
            self._record.write((structure, metadata, bytes(payload), [bytearray(buffer) for buffer in buffers]), timeout)
            self._last = None if leaves else (structure, metadata)
        try:
            for event in after:
                self._stream.wait(event)
            if compute is not None:
                self._stream.wait(compute.record())
            sent = [self._send(tensor) for tensor, _ in flat]
        except BaseException as error:
            raise broken(self._link, f"sending {self._name} to rank {self._peer}", error) from None
        uncopied = [
            (event, own)
            for event, (plain, _), own in zip(sent, flat, tensors, strict=True)
            if plain.numel() and _same_memory(plain, own)  # all empty ones have the same address
        ]
        self.lent = [] if self._keeps else [event for event, _ in uncopied]
        # The device's allocator keeps what is its own; memory of another library lives as long as who holds it.
        while self._held and self._held[0][0].complete:
            self._held.popleft()
        if compute is not None:
            self._held += uncopied

    def _send(self, tensor: Any) -> Event:
        if self._link.size == 2:
            return self._link.send(tensor, self._peer, stream=self._stream)
        return self._link.broadcast(tensor, self._link.rank, stream=self._stream).event

    def write_failure(self, payload: Any, buffers: Any, timeout: float = NO_LIMIT) -> None:
        """Publish an encoded failure in place of a value."""
        self._record.write_failure(payload, buffers, timeout)

    def _moves(self, value: Any) -> bool:
        """Whether the link carries it exactly; all else goes with the record, where the codec keeps or refuses it."""
        if not self._link.device.holds(value):
            return False
        if not isinstance(value, torch.Tensor):  # of a device whose tensors are not torch's
            return True
        return is_exact(value) and not (value.__dict__ or value.is_nested or value.is_quantized)

    def _check_shapes(self, metadata: tuple[_Metadata, ...]) -> None:
        if not self._static_shape:
            return
        if self._promised is None:
            self._promised = metadata
        elif metadata != self._promised:
            expected, given, changed = _text(self._promised), _text(metadata), _changed(self._promised, metadata)
            raise TensorMismatchError(
                f"{self._name} is promised to keep its {' and '.join(changed)} (_static_shape): it was {expected} and now is "
                f"{given}; {', '.join(changed.values())}, or leave the promise out",
                node=self._name,
                expected=expected,
                given=given,
            )


class Arriving:
    """A value whose transfers are under way. Nobody looks at its tensors before all `events` are reached, or on a stream that
    waits for them.

    Attributes:
        events: of the transfers.
        value: gives the value, after that; raises what decoding the rest of it raises.
    """

    __slots__ = ("_device", "_tensors", "events", "value")

    def __init__(self, value: Callable[[], Any], came: Sequence[Received], device: Device) -> None:
        self.value = value
        self.events = [item.event for item in came]
        self._tensors = [item.tensor for item in came]
        self._device = device

    def join(self, stream: Stream) -> None:
        """What is launched on `stream` from now on sees the value, and its memory is kept for that."""
        for event in self.events:
            stream.wait(event)
        for tensor in self._tensors:
            self._device.record_stream(tensor, stream)


class DeviceReader:
    """The reading end. Used by one thread.

    Args:
        record: of the ordinary channel that carries the records.
        link: a communicator, used for this direction only.
        peer: the writer's rank in it.
        stream: of the link's device; transfers are launched on it.
        name: of the value, for messages.
    """

    def __init__(self, record: Reader, link: Communicator, peer: int, stream: Stream, *, name: str) -> None:
        self._record = record
        self._name = name
        self._link = link
        self._peer = peer
        self._stream = stream
        self._last: tuple[Structure, tuple[_Metadata, ...]] = ((1, 0), ())

    def read(self, timeout: float = NO_LIMIT) -> Arriving | Failure:
        """Read the next record and launch its receives. Blocks until there is a record, not for the transfers.

        Raises:
            raycomm._core.TimedOut, raycomm._core.Closed: as the record's channel.
            CommunicatorError: the link is of no use any more.
        """
        record = self._record.read(timeout)
        if type(record) is Failure:
            return record
        try:
            return self._launch(record)
        except BaseException as error:
            raise broken(self._link, f"receiving {self._name} from rank {self._peer}", error) from None

    def _launch(self, record: Any) -> Arriving:
        payload, buffers = b"", []
        if record == SAME:
            structure, metadata = self._last
        else:
            structure, metadata, payload, buffers = record
            if not payload:
                self._last = structure, metadata
        came = [self._recv(shape, _dtype_of(name)) for name, shape, _, _ in metadata]
        tensors = [_shaped(item.tensor, order) for item, (_, _, order, _) in zip(came, metadata, strict=True)]
        flags = [flag for _, _, _, flag in metadata]

        def value() -> Any:
            leaves = decode(payload, buffers) if payload else []
            return put_together(structure, list(map(_flagged, tensors, flags)), leaves)

        return Arriving(value, came, self._link.device)

    def _recv(self, shape: tuple[int, ...], dtype: Any) -> Received:
        if self._link.size == 2:
            return self._link.recv(shape, dtype, self._peer, stream=self._stream)
        return self._link.broadcast(self._link.device.allocate(shape, dtype, self._stream), self._peer, stream=self._stream)


def in_one_piece(tensor: Any, copied_up_to: int) -> tuple[Any, tuple[int, ...] | None]:
    """A contiguous tensor to send, and the order of its dimensions; not the memory of `tensor` if it has up to so many bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    order = None
    if not plain.is_contiguous():
        order = _order_in_memory(plain)
        plain = plain.contiguous() if order is None else plain.permute(order)
    if plain.numel() * plain.itemsize <= copied_up_to and _same_memory(plain, tensor):
        plain = plain.clone()
    return plain, order


def _same_memory(plain: Any, tensor: Any) -> bool:
    return bool(plain.data_ptr() == tensor.data_ptr())


def _order_in_memory(tensor: Any) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost, where the elements lie densely in that order; else None."""
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: (-tensor.stride(dimension), dimension)))
    return order if tensor.permute(order).is_contiguous() else None


def _shaped(tensor: Any, order: tuple[int, ...] | None) -> Any:
    """The dimensions of a received tensor as they were."""
    if order is None:
        return tensor
    back = [0] * len(order)
    for place, dimension in enumerate(order):
        back[dimension] = place
    return tensor.permute(back)


def _flags(tensor: Any) -> int:
    if type(tensor) is torch.nn.Parameter:
        return _PARAMETER | (_REQUIRES_GRAD if tensor.requires_grad else _PLAIN)
    return _REQUIRES_GRAD if getattr(tensor, "requires_grad", False) else _PLAIN


def _flagged(tensor: Any, flags: int) -> Any:
    """The tensor as it was at the sender: a parameter, or with its gradient asked for."""
    if flags == _PLAIN:
        return tensor
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _REQUIRES_GRAD))
    return tensor.requires_grad_()


def broken(link: Communicator, what: str, error: BaseException) -> BaseException:
    """What to raise once a record and its transfers have come apart; the link is of no use any more."""
    link.abort(0.0)
    if not isinstance(error, Exception) or (isinstance(error, CommunicatorError) and not isinstance(error, ValueError)):
        return error
    text = f"{what} at {who(link)}: {type(error).__name__}: {error}; the link is closed, compile the graph again"
    return CommunicatorError(text, **about(link))


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> Any:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SerializationError(
            f"there is no dtype {name!r:.80} here; both ends need one version of torch", path="dtype", type_name=name
        )
    return dtype


def _plain(entry: _Metadata) -> _Metadata:
    """With the shape as it was before sending."""
    name, shape, order, flags = entry
    if order is not None:
        shape = tuple(shape[place] for place in sorted(range(len(order)), key=order.__getitem__))
    return name, shape, order, flags


def _text(metadata: Sequence[_Metadata]) -> str:
    """With the order in memory where it is not that of the dimensions: it is part of the promise."""
    return ", ".join(map(_one_text, metadata)) or "no tensor"


def _changed(promised: Sequence[_Metadata], now: Sequence[_Metadata]) -> dict[str, str]:
    """What has changed, and what to do about it."""
    if len(promised) != len(now):
        return {"number of tensors": "return as many each time"}
    changed: dict[str, str] = {}
    for entry, given in zip(promised, now, strict=True):
        (dtype, shape, order, flags), (other_dtype, other_shape, other_order, other_flags) = _plain(entry), _plain(given)
        if dtype != other_dtype:
            changed["dtype"] = f"convert it, with .to(torch.{dtype})"
        if shape != other_shape:
            changed["shape"] = "return one shape each time"
        elif order != other_order:
            changed["order in memory"] = "return it with .contiguous() each time"
        if flags != other_flags:
            changed["requires_grad"] = "return it with .detach() each time"
    return changed


def _one_text(entry: _Metadata) -> str:
    name, shape, order, flags = _plain(entry)
    laid = "" if order is None else f" with dimensions in the order {list(order)} in memory"
    kind = {_PLAIN: "", _REQUIRES_GRAD: " with requires_grad"}.get(flags, " (a parameter)")
    return f"{shape_text(shape, name)}{laid}{kind}"
