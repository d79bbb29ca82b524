"""torch.distributed: `broadcast_object_list`, and one broadcast of a padded, aligned buffer that holds the pickled value.

`broadcast_object_list` sends sizes first and then bytes: two broadcasts. Where both sides know how large a message can be, one of
a buffer of that size, a multiple of 256 bytes, does.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as distributed

from microbench.transports.base import LIMIT_S, Place, as_array, as_tensor, pickled, unpickled

_ALIGNMENT = 256
_LENGTH_BYTES = 8
_SLACK = 64  # a pickle's length depends a little on the numbers in it


class TorchGloo:
    """`broadcast_object_list` over gloo."""

    backend = "gloo"

    def __init__(self, place: Place) -> None:
        self._place = place

    def offer(self) -> None:
        """Nothing: they meet at a file."""

    def join(self, offers: Sequence[Any]) -> None:
        if self.backend == "nccl":
            torch.cuda.set_device(self._place.rank)
        start: Any = distributed.init_process_group
        start(
            self.backend,
            init_method=f"file://{self._place.directory}/gloo",
            rank=self._place.rank,
            world_size=self._place.readers + 1,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
        distributed.barrier()

    def prepare(self, encoded_bytes: int) -> None:
        """Nothing to do."""

    def encoded_bytes(self, value: Any) -> int:
        return len(pickled(value))

    def write(self, value: Any) -> None:
        distributed.broadcast_object_list([as_array(value)], src=0)

    def read(self) -> Any:
        box = [None]
        distributed.broadcast_object_list(box, src=0)
        return as_tensor(box[0])

    def close(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()


class TorchNccl(TorchGloo):
    """`broadcast_object_list` over NCCL: a GPU per process."""

    backend = "nccl"


class TorchGlooAligned(TorchGloo):
    """One broadcast of a buffer."""

    def prepare(self, encoded_bytes: int) -> None:
        wanted = _LENGTH_BYTES + encoded_bytes + _SLACK
        self._buffer = torch.zeros(-(-wanted // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
        array: Any = self._buffer.numpy()
        self._bytes = memoryview(array)

    def write(self, value: Any) -> None:
        data = pickled(value)
        self._bytes[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        distributed.broadcast(self._buffer, src=0)

    def read(self) -> Any:
        distributed.broadcast(self._buffer, src=0)
        length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
        return unpickled(self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + length])
