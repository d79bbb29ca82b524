"""Checks before anything is launched, the same for every back end: what would hang or corrupt later is an error at the call."""

from __future__ import annotations

import socket
from typing import Any

from raycomm.device.base import OwnStream, Shape, Tensor, shape_text
from raycomm.device.communicator import Communicator
from raycomm.errors import CommunicatorError, TensorMismatchError, WrongDeviceError


def about(communicator: Communicator, peer: int | None = None) -> dict[str, Any]:
    """The attributes that every error of a communicator carries."""
    names = {"communicator": communicator.name, "rank": communicator.rank, "device": communicator.device.name}
    return {**names, "host": socket.gethostname(), "peer": peer}


def who(communicator: Communicator) -> str:
    """A rank in messages."""
    return f"rank {communicator.rank} of {communicator.name} ({communicator.device.name} at {socket.gethostname()})"


def check_peer(communicator: Communicator, peer: int) -> None:
    """Refuse a rank that is this one, or none.

    Raises:
        CommunicatorError
    """
    if not 0 <= peer < communicator.size or peer == communicator.rank:
        others = ", ".join(str(rank) for rank in range(communicator.size) if rank != communicator.rank)
        raise CommunicatorError(f"{who(communicator)} has no peer {peer}; its peers are {others}", **about(communicator, peer))


def check_stream(communicator: Communicator, stream: OwnStream, peer: int | None) -> None:
    """Refuse a stream of another device.

    Raises:
        WrongDeviceError
    """
    if stream.device is not communicator.device:
        expected, given = f"a stream of {communicator.device}", str(stream)
        text = f"{who(communicator)} launches on streams of its device, was given {given}"
        raise WrongDeviceError(text, expected=expected, given=given, **about(communicator, peer))


def check_tensor(communicator: Communicator, tensor: Tensor, peer: int | None = None) -> None:
    """Refuse a tensor that the communicator's device cannot reach, or that is not in one piece.

    Raises:
        WrongDeviceError, TensorMismatchError
    """
    if not communicator.device.holds(tensor):
        where = str(getattr(tensor, "device", type(tensor).__name__))
        expected = communicator.device.name
        raise WrongDeviceError(
            f"{who(communicator)} moves tensors of {expected}, was given one of {where}; move it there first",
            expected=expected,
            given=where,
            **about(communicator, peer),
        )
    contiguous = getattr(tensor, "is_contiguous", None)
    if contiguous is not None and not contiguous():
        given = f"strides {tuple(tensor.stride())} of {shape_text(tensor.shape, tensor.dtype)}"
        text = f"{who(communicator)} moves contiguous tensors, was given one with {given}; call .contiguous()"
        raise TensorMismatchError(text, expected="a contiguous tensor", given=given, **about(communicator, peer))


def check_buffer(communicator: Communicator, into: Tensor, shape: Shape, dtype: Any, peer: int) -> None:
    """Refuse a buffer that does not fit what is to be received.

    Raises:
        WrongDeviceError, TensorMismatchError
    """
    check_tensor(communicator, into, peer)
    if tuple(into.shape) != tuple(shape) or into.dtype != dtype:
        expected, given = shape_text(shape, dtype), shape_text(into.shape, into.dtype)
        text = f"{who(communicator)} receives {expected} from rank {peer}, was given a buffer of {given}"
        raise TensorMismatchError(text, expected=expected, given=given, **about(communicator, peer))
    lazy = [name for name in ("conj", "neg") if getattr(into, f"is_{name}", bool)()]
    if lazy:  # what arrives is plain memory, which this view would show changed
        expected, given = "plain memory", f"a lazily evaluated {lazy[0]} of a tensor"
        text = f"{who(communicator)} receives into {expected}, was given {given}; call .resolve_{lazy[0]}() first"
        raise TensorMismatchError(text, expected=expected, given=given, **about(communicator, peer))


def check_dimension(communicator: Communicator, tensor: Tensor) -> None:
    """Refuse a tensor that has no dimension to put others after it along.

    Raises:
        TensorMismatchError
    """
    if not len(tensor.shape):
        text = f"allgather at {who(communicator)} puts tensors one after the other, was given one without dimensions"
        raise TensorMismatchError(text, expected="a dimension", given="none", **about(communicator))


def check_parts(communicator: Communicator, tensor: Tensor) -> None:
    """Refuse a tensor that cannot be divided among the ranks.

    Raises:
        TensorMismatchError
    """
    if not len(tensor.shape) or tensor.shape[0] % communicator.size:
        given = shape_text(tensor.shape, tensor.dtype)
        expected = f"a first dimension that {communicator.size} ranks divide"
        text = f"reducescatter at {who(communicator)} takes {expected}, was given {given}"
        raise TensorMismatchError(text, expected=expected, given=given, **about(communicator))
