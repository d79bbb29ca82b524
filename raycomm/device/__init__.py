"""Devices and communicators: the interfaces (`base`, `communicator`), the checks all back ends share, and the back ends.

`gloo` moves CPU tensors between processes, `nccl` those of CUDA devices (`cuda`). The simulated back end is for tests:
`raycomm.testing.simulated_communicator`.
"""

from raycomm.device.base import Device, Event, Stream, Tensor
from raycomm.device.communicator import Communicator, Received, streams

__all__ = ["Communicator", "Device", "Event", "Received", "Stream", "Tensor", "streams"]
