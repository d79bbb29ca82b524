"""Damaged messages to the native decoder: each decodes or raises SerializationError. Nothing else, and no crash.

The fuzz runs in a process of its own, so that a crash is a failed test; by hand:
`python -m tests.unit.test_native_malformed SEED SECONDS`.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm import _core, codec
from raycomm.errors import SerializationError
from tests.unit.strategies import GOLDEN
from tests.unit.test_codec_malformed import MESSAGES, TENSOR_HEADS, ext, touch

ROOT = Path(__file__).parents[2]
PICKLE = b"\x0c"  # a pickle may do anything: what the fuzz makes of one is not run


def verdict(decode: Any, payload: bytes, buffers: list[bytes]) -> bool:
    """Whether it decodes; anything but SerializationError goes up."""
    try:
        value = decode(payload, buffers)
    except SerializationError:
        return False
    touch(value)
    return True


def python_decode(payload: bytes, buffers: list[bytes]) -> Any:
    return codec.decode(payload, [bytearray(buffer) for buffer in buffers])


def message_of(value: Any) -> tuple[bytes, list[bytes]]:
    return _core.encode(value)


@pytest.mark.parametrize("value", MESSAGES, ids=range(len(MESSAGES)))
def test_every_truncation_is_an_error(value: Any) -> None:
    payload, buffers = message_of(value)
    assert verdict(_core.decode, payload, buffers)
    for end in range(len(payload)):
        assert not verdict(_core.decode, payload[:end], buffers), end
    assert not verdict(_core.decode, payload + b"\x00", buffers)


@pytest.mark.parametrize("value", MESSAGES, ids=range(len(MESSAGES)))
def test_every_bit_flip_decodes_or_is_an_error(value: Any) -> None:
    payload, buffers = message_of(value)
    for position in range(8 * len(payload)):
        changed = bytearray(payload)
        changed[position // 8] ^= 1 << position % 8
        if PICKLE not in changed:
            verdict(_core.decode, bytes(changed), buffers)


@pytest.mark.parametrize("value", MESSAGES, ids=range(len(MESSAGES)))
def test_wrong_buffers_are_an_error(value: Any) -> None:
    payload, buffers = message_of(value)
    for index, buffer in enumerate(buffers):
        assert not verdict(_core.decode, payload, buffers[:index])
        assert not verdict(_core.decode, payload, [*buffers[:index], buffer + b"\0", *buffers[index + 1 :]])
        if buffer:
            assert not verdict(_core.decode, payload, [*buffers[:index], buffer[:-1], *buffers[index + 1 :]])


@pytest.mark.parametrize("code", [9, 10])
@pytest.mark.parametrize("body", TENSOR_HEADS.values(), ids=TENSOR_HEADS.keys())
def test_hostile_heads(body: bytes, code: int) -> None:
    assert not verdict(_core.decode, b"\x01" + ext(code, body), [bytes(16)])
    assert not verdict(_core.decode, b"\x01\x91" + ext(3, b"\x91" + ext(code, body)), [bytes(16)])


@pytest.mark.parametrize("first", [0xDC, 0xDD, 0xDE, 0xDF, 0xDA, 0xDB, 0xC5, 0xC6, 0xC8, 0xC9], ids=hex)
def test_huge_claims(first: int) -> None:
    header = bytes((first,)) + b"\xff\xff\xff\xff\x03"
    for prefix in (b"", b"\x91", b"\x91" * 199, b"\x91" * 499, ext(3, b"\x91")):
        assert not verdict(_core.decode, b"\x01" + prefix + header, [])
        assert not verdict(_core.decode, b"\x01" + prefix + header + bytes(100), [])


@pytest.mark.parametrize("depth", [199, 200, 201, 501, 5000, 100_000])
def test_nesting_bombs(depth: int) -> None:
    for opener, closer in ((b"\x91", b"\xc0"), (b"\x81\x00", b"\xc0")):
        assert verdict(_core.decode, b"\x01" + opener * depth + closer, []) == (depth <= 500)
    if depth <= 5000:
        body = b"\xc0"
        for _ in range(depth):
            body = ext(3, b"\x91" + body)
        assert verdict(_core.decode, b"\x01" + body, []) == (depth <= 500)


def test_versions_and_empty_messages() -> None:
    with pytest.raises(SerializationError, match=r"version 2.* version 1"):
        _core.decode(b"\x02\xc0", [])
    for payload in (b"", b"\x01", b"\x00\xc0"):
        assert not verdict(_core.decode, payload, [])


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=80).filter(lambda noise: PICKLE not in noise))
def test_noise_is_judged_alike(noise: bytes) -> None:
    for payload in (noise, b"\x01" + noise):
        assert verdict(_core.decode, payload, []) == verdict(python_decode, payload, []) or more_lenient(payload)


def more_lenient(payload: bytes) -> bool:
    """Where the codecs may differ: forms that no encoder writes (32-bit floats, timestamps, other codes of msgpack's)."""
    return b"\xca" in payload or b"\xff" in payload


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_splices_decode_or_are_an_error(data: st.DataObject) -> None:
    first, first_buffers = message_of(data.draw(st.sampled_from(MESSAGES)))
    second, second_buffers = message_of(data.draw(st.sampled_from(MESSAGES)))
    spliced = first[: data.draw(st.integers(0, len(first)))] + second[data.draw(st.integers(0, len(second))) :]
    for buffers in (first_buffers, second_buffers, first_buffers + second_buffers):
        verdict(_core.decode, spliced, buffers)


def fuzz(seed: int, seconds: float) -> Counter[str]:
    """Damages messages in every way for a while; what came of it. Raises what should not come out."""
    rng = random.Random(seed)
    values = [*MESSAGES, *(value for value, _ in GOLDEN), torch.arange(6).reshape(2, 3), [np.arange(3.0), torch.ones(2)]]
    pool = [message_of(value) for value in values]
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(200):
            payload, buffers = rng.choice(pool)
            damaged = bytearray(payload)
            for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
                damage(damaged, rng, pool)
            if rng.random() < 0.1 and buffers:
                buffers = list(buffers)
                buffers[rng.randrange(len(buffers))] = rng.randbytes(rng.randrange(64))
            if PICKLE in damaged:
                continue
            native = verdict(_core.decode, bytes(damaged), buffers)
            python = verdict(python_decode, bytes(damaged), buffers)
            seen[f"native {'decodes' if native else 'refuses'}, python {'decodes' if python else 'refuses'}"] += 1
            if native != python:
                seen[f"example: {bytes(damaged).hex()} {[len(buffer) for buffer in buffers]}"] += 1
    return seen


def damage(data: bytearray, rng: random.Random, pool: list[tuple[bytes, list[bytes]]]) -> None:
    at = rng.randrange(len(data)) if data else 0
    kind = rng.randrange(7)
    if not data or kind == 0:
        data[at:at] = rng.randbytes(rng.randrange(1, 6))
    elif kind == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at] = rng.choice((0, 1, 127, 128, 255, 0xC1, 0xC7, 0xC9, 0xDD, 0xDF, 0x91, 0xD6, *range(9, 14)))
    elif kind == 3:
        del data[at : at + rng.randrange(1, 9)]
    elif kind == 4:
        other = rng.choice(pool)[0]
        cut = rng.randrange(len(other))
        data[at:] = other[cut:]
    elif kind == 5:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, rng.getrandbits(64)))
        data[at : at + width] = (number & (1 << 8 * width) - 1).to_bytes(width, rng.choice(("little", "big")))
    else:
        data[at:at] = data[at : at + rng.randrange(1, 20)]


def run_fuzz(seed: int, seconds: float) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.unit.test_native_malformed", str(seed), str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 10 * seconds, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "native refuses" in done.stdout
    assert "native decodes" in done.stdout


def test_fuzz(seed: int) -> None:
    run_fuzz(seed, 5.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_fuzz(seed: int) -> None:
    run_fuzz(seed, 120.0)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    for what, count in fuzz(int(sys.argv[1]), float(sys.argv[2])).most_common(60):
        print(count, what)
