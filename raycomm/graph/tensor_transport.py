"""Words for how tensors travel, and for where they are to lie."""

from __future__ import annotations

from enum import StrEnum


class TensorTransport(StrEnum):
    """How tensors of a value travel.

    AUTO: from device to device where that is possible, else through shared memory. SHM: shared memory. NCCL: from device to
    device, by whatever the devices have for that; "accelerator" is another word for it. GLOO: CPU tensors, between processes.
    OWN: by a communicator that the user brought, see `raycomm.graph.own_communicator`; no word stands for it.
    """

    AUTO = "auto"
    SHM = "shm"
    NCCL = "nccl"
    GLOO = "gloo"
    OWN = "own"


class TensorDevice(StrEnum):
    """Where tensors of a value lie at the reader. DEFAULT: where they lay at the sender. GPU: "cuda" is another word for it."""

    DEFAULT = "default"
    CPU = "cpu"
    GPU = "gpu"
