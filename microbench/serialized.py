"""The values of the serializer bench, and what it means that one came back.

Each is made from a seed of its own, so it is the same in every run, whichever others are chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

SEED = 20_240_601
TUPLES_AS_LISTS = "tuples come back as lists"

# numpy and torch are imported where a value needs them: listing the values does not.


@dataclass(frozen=True)
class Sampling:
    """Parameters as an inference server has them, one request's."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: list[str]
    seed: int | None


@dataclass(frozen=True)
class Request:
    """A request on its way from a scheduler to a worker."""

    request_id: str
    prompt_token_ids: list[int]
    block_ids: list[int]
    computed_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Value:
    """One row of the bench.

    Attributes:
        make: the value, from a source of random numbers.
        schema: its type, for codecs that can be told it ahead.
    """

    name: str
    make: Callable[[random.Random], Any]
    schema: Any = Any

    def made(self) -> Any:
        """The value; equal each time."""
        return self.make(random.Random(f"{SEED}/{self.name}"))


def _token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(128_000) for _ in range(count)]


def _request_id(rng: random.Random) -> str:
    return f"cmpl-{rng.getrandbits(128):032x}-0"


def _flat_request(rng: random.Random) -> dict[str, Any]:
    return {
        "request_id": _request_id(rng),
        "prompt_tokens": 128,
        "max_tokens": 256,
        "temperature": 0.7,
        "stream": True,
        "priority": 0,
        "user": None,
    }


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": round(rng.random(), 2),
        "top_p": 0.95,
        "top_k": 50,
        "max_tokens": 256,
        "stop": ["</s>", "\n\n"],
        "seed": None,
        "logprobs": None,
    }


def _scheduled(rng: random.Random) -> dict[str, Any]:
    """What a scheduler sends its workers before a step: 4 new requests, 32 running ones."""
    new = [
        {
            "request_id": _request_id(rng),
            "prompt_token_ids": _token_ids(rng, rng.randrange(64, 257)),
            "block_ids": [[rng.randrange(20_000) for _ in range(16)]],
            "computed_tokens": 0,
            "sampling": _sampling(rng),
            "lora": None,
        }
        for _ in range(4)
    ]
    running = [_request_id(rng) for _ in range(32)]
    return {
        "step": 1234,
        "new": new,
        "running": {
            "request_ids": running,
            "new_token_ids": [_token_ids(rng, 1) for _ in running],
            "new_block_ids": [[[rng.randrange(20_000)]] if rng.random() < 0.1 else None for _ in running],
            "computed_tokens": [rng.randrange(2048) for _ in running],
        },
        "scheduled_tokens": dict.fromkeys(running, 1),
        "finished": [_request_id(rng) for _ in range(2)],
    }


def _sampling_parameters(rng: random.Random) -> Sampling:
    return Sampling(round(rng.random(), 2), 0.95, 50, 256, ["</s>", "\n\n"], None)


def _request(rng: random.Random) -> Request:
    blocks = [rng.randrange(20_000) for _ in range(16)]
    return Request(_request_id(rng), _token_ids(rng, 128), blocks, 0, _sampling_parameters(rng))


def _ints(count: int) -> Callable[[random.Random], list[int]]:
    return lambda rng: _token_ids(rng, count)


def _floats(count: int) -> Callable[[random.Random], list[float]]:
    return lambda rng: [rng.random() for _ in range(count)]


def _array(nbytes: int) -> Callable[[random.Random], Any]:
    def make(rng: random.Random) -> Any:
        import numpy as np

        return np.random.default_rng(rng.getrandbits(32)).standard_normal(nbytes // 4, dtype=np.float32)

    return make


def _tensor(*shape: int) -> Callable[[random.Random], Any]:
    def make(rng: random.Random) -> Any:
        import torch

        return torch.full(shape, rng.random(), dtype=torch.float16)

    return make


def _record(rng: random.Random) -> tuple[Any, ...]:
    """The record that announces two tensors, in a dict, on a channel between devices: drawn in `raycomm.channel.device`."""
    structure = (4, ("hidden", "residual"), ((0, 0), (0, 1)))
    metadata = (("float16", (4, 24_576), None, 0), ("float32", (4, 128, 64), (0, 2, 1), 1))
    return (structure, metadata, b"", [])


# As far as a decoder that is told types has to know it.
_RECORD = tuple[
    tuple[int, tuple[str, ...], tuple[tuple[int, int], ...]],
    tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None, int], ...],
    bytes,
    list[bytes],
]

VALUES: dict[str, Value] = {
    value.name: value
    for value in (
        Value("tensor_metadata", _record, _RECORD),
        Value("tensor_empty", _tensor(0, 24_576)),  # a tensor's message without one element: its metadata alone
        Value("tensor_1x1", _tensor(1, 1)),
        Value("int", lambda rng: rng.randrange(1 << 15), int),
        Value("str_16", lambda rng: f"{rng.getrandbits(64):016x}", str),
        Value("bytes_64", lambda rng: rng.randbytes(64), bytes),
        Value("request_flat", _flat_request, dict[str, Any]),
        Value("request_nested", _scheduled, dict[str, Any]),
        Value("list_int_101", _ints(101), list[int]),
        Value("list_int_1024", _ints(1024), list[int]),
        Value("list_int_16384", _ints(16_384), list[int]),
        Value("list_float_1024", _floats(1024), list[float]),
        Value("array_4KiB", _array(4 << 10)),
        Value("array_1MiB", _array(1 << 20)),
        Value("dataclass", _sampling_parameters, Sampling),
        Value("dataclass_nested", _request, Request),
    )
}


def same(got: Any, wanted: Any) -> bool:
    """Whether a value came back as it was, down to the types of its parts."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, dict):
        return same(list(got), list(wanted)) and all(map(same, got.values(), wanted.values()))
    if is_dataclass(wanted):
        return all(same(getattr(got, field.name), getattr(wanted, field.name)) for field in fields(wanted))
    if hasattr(wanted, "dtype"):
        # Both torch's and numpy's: shape, dtype and every element.
        return got.dtype == wanted.dtype and got.shape == wanted.shape and bool((got == wanted).all())
    return bool(got == wanted)


def tuples_as_lists(value: Any) -> Any:
    """The value as a format without tuples can give it back."""
    if isinstance(value, (list, tuple)):
        return [tuples_as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: tuples_as_lists(item) for key, item in value.items()}
    return value
