"""What a codec has to offer to be measured.

Calls are timed in batches, so what an adapter gives are batches too: a Python function around each single call would cost as much
as the fastest codec does. `each` and `each_of` make them of single calls, and loop in C.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

from microbench.serialized import Value

EncodeBatch: TypeAlias = Callable[[Any, int], list[Any]]
DecodeBatch: TypeAlias = Callable[[list[Any]], list[Any]]


class NotInstalled(Exception):
    """A package that a codec needs; the text says how to get it."""


@dataclass(frozen=True)
class Calls:
    """A codec made ready for one value.

    Attributes:
        encode: a value so many times over: the messages.
        decode: messages, each once and in order: the values.
        size: bytes of a message.
    """

    encode: EncodeBatch
    decode: DecodeBatch
    size: Callable[[Any], int] = len


@dataclass(frozen=True)
class Codec:
    """One system of the bench.

    Attributes:
        module: of this package. Imported when its turn comes: a codec that is not installed leaves its own rows out only.
        package: whose version it has; None: Python's.
        what: what is called.
    """

    name: str
    module: str
    package: str | None
    what: str

    def calls_for(self, value: Value) -> Calls:
        """The codec made ready. Raises `NotInstalled`."""
        try:
            module = importlib.import_module(f"microbench.codecs.{self.module}")
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "microbench"):
                raise
            raise NotInstalled(f"not installed: pip install {package}") from error
        calls: Calls = module.calls_for(value)
        return calls


def each(encode: Callable[[Any], Any]) -> EncodeBatch:
    return lambda value, count: list(map(encode, repeat(value, count)))


def each_of(decode: Callable[[Any], Any]) -> DecodeBatch:
    return lambda messages: list(map(decode, messages))


def size_of_parts(message: tuple[bytes, list[Any]]) -> int:
    """Of a payload and its buffers."""
    payload, buffers = message
    return len(payload) + sum(map(len, buffers))
