"""What the broadcast bench sends: lists of ints as a tokenizer gives them, and tensors, each message unlike the one before.

Message number i of a list begins with i; message i of a tensor is filled with `1 + i % 8`. So a reader that was handed an old
message, or half of one, is found out: lists by first element and length, tensors by sum, and the last message of a row whole.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

SEED = 20_261_130
TOKENS = 150_000  # of a vocabulary
_KIB, _MIB = 1 << 10, 1 << 20
_SUM_TOLERANCE = 1e-3  # float32 sums are not exact; the nearest wrong message differs by an eighth


class WrongMessage(Exception):
    """A reader got something else than what was sent."""


class Sort(StrEnum):
    LIST = "list"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Workload:
    """One row: messages of one sort and size.

    Attributes:
        size: ints of a list, bytes of a tensor.
    """

    sort: Sort
    size: int

    @property
    def name(self) -> str:
        """The row."""
        return f"list_{self.size}" if self.sort is Sort.LIST else f"tensor_{_bytes(self.size)}"

    @property
    def nbytes(self) -> int:
        """What a message takes in memory, about."""
        return 8 * self.size if self.sort is Sort.LIST else self.size

    def prepare(self) -> None:
        """Make now what all messages have in common, so that it is there when the first one is made or looked at."""
        if self.sort is Sort.LIST:
            _tokens(self.size - 1)

    def message(self, number: int) -> Any:
        """What is sent, made anew."""
        if self.sort is Sort.LIST:
            return [number, *_tokens(self.size - 1)]
        import torch

        return torch.full((self.size // 4,), float(1 + number % 8), dtype=torch.float32)

    def take(self, value: Any) -> Any:
        """What a reader does before it counts a message as received: sum a tensor."""
        return value if self.sort is Sort.LIST else float(value.sum())

    def check(self, number: int, value: Any, taken: Any) -> None:
        """Raises `WrongMessage`; looks at little of a list, so that it can follow every message."""
        if self.sort is Sort.LIST:
            if len(value) != self.size or value[0] != number:
                raise WrongMessage(f"{self.name}: message {number} came as {len(value)} ints that begin with {value[:1]}")
            return
        expected = (1 + number % 8) * (self.size // 4)
        if not abs(taken - expected) <= _SUM_TOLERANCE * expected:  # so that NaN is wrong, too
            raise WrongMessage(f"{self.name}: message {number} sums to {taken:g}, not {expected:g}")

    def check_whole(self, number: int, value: Any) -> None:
        """Raises `WrongMessage` where anything in it is wrong."""
        expected = self.message(number)
        right = value == expected if self.sort is Sort.LIST else bool((value == expected).all())
        if not right:
            raise WrongMessage(f"{self.name}: message {number} has the right length and wrong contents")


@cache  # not of the workload, which is sent to the readers: they make their own
def _tokens(count: int) -> list[int]:
    numbers = random.Random(SEED)
    return [numbers.randrange(TOKENS) for _ in range(count)]


def _bytes(size: int) -> str:
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit}{name}"
    return f"{size}B"


LISTS = tuple(Workload(Sort.LIST, size) for size in (*range(101, 1011, 101), *(1 << power for power in range(10, 19))))
TENSORS = tuple(
    Workload(Sort.TENSOR, size)
    for size in (4, 64, _KIB, 4 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB)
)
WORKLOADS = {workload.name: workload for workload in (*LISTS, *TENSORS)}
