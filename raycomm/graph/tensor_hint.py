"""What `with_tensor_transport` asks for, checked: how the tensors of a value travel, and where they are to lie at the reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Self

from raycomm.errors import CompileError
from raycomm.graph.own_communicator import NoCommunicatorError, OwnCommunicator, read_communicator, shown, works_on_cpu
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport

_WORDS = {
    "accelerator": TensorTransport.NCCL,
    **{str(member): member for member in TensorTransport if member is not TensorTransport.OWN},
}
_PLACES = {"cuda": TensorDevice.GPU, **{str(member): member for member in TensorDevice}}
_APART = {
    (TensorTransport.NCCL, TensorDevice.CPU): "use 'shm' for tensors in host memory, or leave the device out",
    (TensorTransport.GLOO, TensorDevice.GPU): "use 'nccl' for tensors on GPUs, or leave the device out",
    (TensorTransport.OWN, TensorDevice.CPU): "leave the device out: the communicator says where tensors lie",
    (TensorTransport.OWN, TensorDevice.GPU): "leave the device out: the communicator says where tensors lie",
}


@dataclass(frozen=True, slots=True)
class TensorHint:
    """A checked hint.

    Attributes:
        static_shape: a promise that dtypes, shapes and layouts never change.
        direct_return: a promise that the value is exactly one tensor.
        own: the communicator, where `transport` is OWN.
    """

    transport: TensorTransport = TensorTransport.AUTO
    device: TensorDevice = TensorDevice.DEFAULT
    static_shape: bool = False
    direct_return: bool = False
    own: OwnCommunicator | None = None

    @classmethod
    def checked(cls, node: str, transport: object, device: object, static_shape: bool, direct_return: bool) -> Self:
        """The hint as given for `node`. A communicator of Ray's that works on the CPU stands for shared memory.

        Raises:
            CompileError: an unknown transport or device, or two that exclude each other.
        """
        found = _transport(node, transport)
        own = found if isinstance(found, OwnCommunicator) else None
        kind = TensorTransport.OWN if isinstance(found, OwnCommunicator) else found
        place = _PLACES.get(device) if isinstance(device, str) else None
        if place is None:
            remedy = "use 'default', 'cpu' or 'gpu' (or 'cuda')"
            _refuse(node, f"device {device!r:.80} of node {node} is none that there is", remedy)
        if (kind, place) in _APART:
            word = repr(transport if isinstance(transport, str) else str(kind)) if own is None else own.name
            problem = f"transport {word} and device {device!r} of node {node} exclude each other"
            _refuse(node, problem, _APART[kind, place])
        return cls(kind, place, bool(static_shape), bool(direct_return), own)


def _transport(node: str, given: object) -> TensorTransport | OwnCommunicator:
    words = "'auto', 'shm', 'nccl' (or 'accelerator'), 'gloo'"
    remedy = f"use {words}, a class like raycomm.device.Communicator, or an object of Ray's"
    try:
        found = _WORDS.get(given) if isinstance(given, str) else read_communicator(given)
        if isinstance(found, OwnCommunicator) and works_on_cpu(found):
            return TensorTransport.SHM  # as in Ray, whose edges go through shared memory beside it
    except NoCommunicatorError as problem:
        _refuse(node, f"transport of node {node}: {problem}", problem.remedy, "transport")
    if found is None:
        _refuse(node, f"transport {shown(given):.80} of node {node} is none that there is", remedy, "transport")
    return found


def _refuse(node: str, problem: str, remedy: str, argument: str = "device") -> NoReturn:
    raise CompileError(f"{problem}; {remedy}", node=node, argument=argument, remedy=remedy)
