"""What `with_tensor_transport` asks for, checked: how the tensors of a value travel, and where they are to lie at the reader."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from raycomm.errors import CompileError

_ACCELERATOR = "accelerator"
_CUDA = "cuda"


class TensorTransport(StrEnum):
    """How tensors of a value travel.

    AUTO: from device to device where that is possible, else through shared memory. SHM: shared memory. NCCL: from device to
    device, by whatever the devices have for that; "accelerator" is another word for it. GLOO: CPU tensors, between processes.
    """

    AUTO = "auto"
    SHM = "shm"
    NCCL = "nccl"
    GLOO = "gloo"


class TensorDevice(StrEnum):
    """Where tensors of a value lie at the reader. DEFAULT: where they lay at the sender. GPU: "cuda" is another word for it."""

    DEFAULT = "default"
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class TensorHint:
    """A checked hint. The last two are promises: dtypes, shapes and layouts never change; the value is exactly one tensor."""

    transport: TensorTransport = TensorTransport.AUTO
    device: TensorDevice = TensorDevice.DEFAULT
    static_shape: bool = False
    direct_return: bool = False

    @classmethod
    def checked(cls, node: str, transport: object, device: object, static_shape: bool, direct_return: bool) -> Self:
        """The hint as given for `node`. A communicator of Ray's that works on the CPU stands for shared memory.

        Raises:
            CompileError: an unknown transport or device, or two that exclude each other.
        """
        names = {_ACCELERATOR: TensorTransport.NCCL, **{str(member): member for member in TensorTransport}}
        found = names.get(transport) if isinstance(transport, str) else _of_communicator(transport)
        if found is None:
            text = repr(transport) if isinstance(transport, str) else f"of type {type(transport).__name__}"
            remedy = "use 'auto', 'shm', 'nccl' (or 'accelerator') or 'gloo'"
            raise CompileError(
                f"transport {text:.80} of node {node} is none that there is; {remedy}",
                node=node,
                argument="transport",
                remedy=remedy,
            )
        places = {_CUDA: TensorDevice.GPU, **{str(member): member for member in TensorDevice}}
        place = places.get(device) if isinstance(device, str) else None
        if place is None:
            remedy = "use 'default', 'cpu' or 'gpu' (or 'cuda')"
            text = f"device {device!r:.80} of node {node} is none that there is; {remedy}"
            raise CompileError(text, node=node, argument="device", remedy=remedy)
        apart = {
            (TensorTransport.NCCL, TensorDevice.CPU): "use 'shm' for tensors in host memory, or leave the device out",
            (TensorTransport.GLOO, TensorDevice.GPU): "use 'nccl' for tensors on GPUs, or leave the device out",
        }
        if (remedy := apart.get((found, place), "")) != "":
            text = f"transport {str(found)!r} and device {str(place)!r} of node {node} exclude each other; {remedy}"
            raise CompileError(text, node=node, argument="device", remedy=remedy)
        return cls(found, place, bool(static_shape), bool(direct_return))


def _of_communicator(value: object) -> TensorTransport | None:
    """What a communicator of Ray's stands for on an edge. Ray, too, sends through shared memory beside its CPU communicator."""
    name = getattr(type(value), "get_transport_name", None)
    return TensorTransport.SHM if callable(name) and name(value) == "cpu" else None
