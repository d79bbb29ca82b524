"""What runs under callgrind: raycomm's write, read, encode and decode of fixed values, with marks between them.

    valgrind --tool=callgrind --instr-atstart=no --dump-before=getpriority python -m microbench.counted builtins 0

The child warms up, says `READY`, and goes on when it is told `GO`, with callgrind switched on (`microbench.callgrind` does that).
Callgrind writes what it has counted whenever `MARK` is called, and starts again from zero: what lies between two marks has a
count of its own. Each operation is done `CALLS` times between two marks and twice as often between two others. The difference of
the two counts is the operation's, without the marks; of Python there is only the loop around the call, which is C.

One process writes the ring and reads it. Valgrind 3.19 knows no `pidfd_open`, without which a peer's memory cannot be attached,
and of two processes it would count how they wait for each other.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat, starmap
from typing import Any

from raycomm import _core
from raycomm.channel import RingLayout, ShmArena
from raycomm.options import Options

MARK = "getpriority"  # a function of the C library that nothing here calls for its own sake
CALLS = 16
READY, GO = b"ready\n", b"g"
WARM_UPS = 3  # rounds before the one that is counted: free lists and buffers have their size then

_CHANNEL = 1
_SLOTS = 4 * CALLS
_INLINE_BYTES = 1024
_LIMIT_BYTES = 64 << 20


class Operation(enum.StrEnum):
    """What is counted, each of them one native call.

    `write` encodes and publishes, `read` takes, decodes, and frees the value again: a channel has no other calls. `encode` and
    `decode` are the codec's own entry points, between a value and bytes objects. They make the bytes objects and an encoder or
    decoder at each call, which a channel does not, so that `write` less `encode` is not the ring's share.
    """

    WRITE = "write"
    READ = "read"
    ENCODE = "encode"
    DECODE = "decode"


class Group(enum.StrEnum):
    """Values that are counted in one process. Tensors have their own: importing torch takes long under valgrind."""

    BUILTINS = "builtins"
    ARRAYS = "arrays"
    TENSORS = "tensors"


def _request() -> dict[str, Any]:
    return {
        "request_id": "cmpl-5e1f0c",
        "prompt_token_ids": [*range(1000, 1064)],
        "sampling": {"temperature": 0.7, "top_p": 0.95, "max_tokens": 256, "stop": ["\n\n", "</s>"], "seed": None},
        "arrival": 1764500000.25,
        "priority": (1, 0),
        "stream": True,
    }


def _array() -> Any:
    import numpy as np

    return np.arange(1024, dtype=np.float32)


def _tensor(shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.ones(shape, dtype=getattr(torch, dtype))


VALUES: dict[Group, dict[str, Callable[[], Any]]] = {
    Group.BUILTINS: {
        "int": lambda: 1,
        "str": lambda: "a short text",
        "dict": lambda: {"step": 7, "loss": 0.25, "done": False},
        "list101": lambda: [*range(101)],
        "list1024": lambda: [*range(1024)],
        "request": _request,
    },
    Group.ARRAYS: {"array_4KiB": _array},
    Group.TENSORS: {
        "tensor_1x1": lambda: _tensor((1, 1), "float32"),
        "tensor_192KiB": lambda: _tensor((4, 24576), "float16"),
    },
}


def sections(group: Group) -> Iterator[tuple[str, Operation, int]]:
    """(value, operation, calls) between each two marks, in the order in which `count` has them."""
    for value in VALUES[group]:
        for calls in (CALLS, 2 * CALLS):
            for operation in Operation:
                yield value, operation, calls


def count(group: Group, layout: int, begin: Callable[[], object], mark: Callable[[], object]) -> None:
    """Do all of `sections(group)`, and call `mark` before and after each.

    Args:
        layout: of the heap: another number, other addresses.
        begin: called after everything was done without marks.

    Raises:
        ValueError: a value came back changed.
    """
    shifted = [bytes(33 * (number % 13)) for number in range(997 * layout)]
    arena = ShmArena.create(
        0, [RingLayout(_CHANNEL, _SLOTS, _INLINE_BYTES, (0,))], Options(shm_limit_bytes=_LIMIT_BYTES), loops=1, processes=1
    )
    arena.join(0)
    write, read = arena.writer([_CHANNEL]).write, arena.reader(0, _CHANNEL, 0, drain=True).read
    values = {name: make() for name, make in VALUES[group].items()}
    messages = {name: _core.encode(value) for name, value in values.items()}
    for name, value in values.items():
        write(value)
        if _core.encode(read()) != messages[name] or _core.encode(_core.decode(*messages[name])) != messages[name]:
            raise ValueError(f"{name} came back changed")

    def do(name: str, operation: Operation, calls: int, mark: Callable[[], object]) -> None:
        arguments: dict[Operation, tuple[Callable[..., object], tuple[Any, ...]]] = {
            Operation.WRITE: (write, (values[name],)),
            Operation.READ: (read, ()),
            Operation.ENCODE: (_core.encode, (values[name],)),
            Operation.DECODE: (_core.decode, messages[name]),
        }
        call, args = arguments[operation]
        todo = starmap(call, repeat(args, calls))
        mark()
        deque(todo, maxlen=0)
        mark()

    filled = _fill_holes()
    for _ in range(WARM_UPS):
        for section in sections(group):
            do(*section, lambda: None)
    begin()
    for section in sections(group):
        do(*section, mark)
    del shifted, filled  # not before: other addresses would be handed out again


def _begin() -> None:
    """Say that all is ready, and wait until callgrind counts."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    os.set_blocking(sys.stdin.fileno(), False)
    # Not asleep in the kernel: valgrind hears of the switch only when the program runs, or else has to trace it.
    while True:
        try:
            if os.read(sys.stdin.fileno(), len(GO)) != GO:
                os._exit(1)  # nobody counts any more
            return
        except BlockingIOError:
            pass


def _fill_holes() -> list[bytes]:
    """Fill the holes that the imports have left in the heaps; those in Python's own for as long as the caller keeps what it gets.

    An allocator takes longer where it has holes to look through, and which ones there are depends on path names and on whether
    the modules were compiled before: 5 % of a short call. What is allocated from now on comes from where nothing was.
    """
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    for size in [*range(16, 1040, 16)] * 500 + [1 << power for power in range(10, 18)] * 100:
        malloc(size)  # kept until the process ends
    return [bytes(size) for size in [*range(0, 480, 16)] * 2000 + [460] * 60_000]


def _mark() -> None:
    os.getpriority(os.PRIO_PROCESS, 0)


if __name__ == "__main__":
    gc.disable()  # when a collection comes depends on everything that was ever allocated
    count(Group(sys.argv[1]), int(sys.argv[2]), _begin, _mark)
    os._exit(0)  # the end of an interpreter with torch in it takes callgrind long, and is not counted
