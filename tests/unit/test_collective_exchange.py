"""Collectives on real rings, against the same calculation in one place: every operation, dtype, shape, number of actors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raycomm.codec import Failure
from raycomm.errors import CollectiveError
from raycomm.graph.model import CollectiveKind, ReduceOp
from raycomm.runtime import collectives
from tests.unit.exchange_world import World

TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
]
# What torch may or may not calculate with.
RARE_DTYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
NUMPY_DTYPES = ["f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16", ">f4", ">i8"]
SHAPES = [(), (0,), (3,), (8,), (4, 3), (12, 2, 5)]
ORDER = (ReduceOp.MIN, ReduceOp.MAX)
BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@pytest.fixture(params=["1", "2", "3", "4", "4 in parts"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """So many ranks, which share the work of an allreduce or not."""
    count, _, parts = request.param.partition(" ")
    monkeypatch.setattr(collectives, "SHARE_FROM_BYTES", 1 if parts else 1 << 40)
    with World(int(count)) as world:
        yield world


def fits(op: ReduceOp, kind: str) -> bool:
    """Whether an operation is for a numpy kind; the rule that ReduceOp states."""
    if op in BITS:
        return kind in "biu"
    if op in ORDER:
        return kind != "c"
    return kind in "fc" if op is ReduceOp.AVG else kind != "b"


def numbers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    """Random numbers, with infinities, NaN and both zeros among them where the dtype has them."""
    kind = np.dtype(dtype).kind
    if kind in "iub":
        return np.asarray(rng.integers(0 if kind in "ub" else -100, 2 if kind == "b" else 100, shape)).astype(dtype)
    made = np.asarray(rng.normal(size=shape))
    special = np.asarray(rng.choice([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan], shape))
    if kind == "f":  # libraries differ in what an infinite part makes of the other part of a complex number
        made = np.where(rng.random(shape) < 0.3, special, made)
    with np.errstate(all="ignore"):
        return np.asarray(made + (1j * rng.normal(size=shape) if kind == "c" else 0)).astype(dtype)


def reduced(op: ReduceOp, values: list[Any]) -> Any:
    """The reference, by the libraries' own functions on whole tensors."""
    lib: Any = np if isinstance(values[0], np.ndarray) else torch
    functions = {
        ReduceOp.SUM: lambda a, b: a + b,
        ReduceOp.AVG: lambda a, b: a + b,
        ReduceOp.PRODUCT: lambda a, b: a * b,
        ReduceOp.MIN: lib.minimum,
        ReduceOp.MAX: lib.maximum,
        ReduceOp.BAND: lambda a, b: a & b,
        ReduceOp.BOR: lambda a, b: a | b,
        ReduceOp.BXOR: lambda a, b: a ^ b,
    }
    result = values[0]
    with np.errstate(all="ignore"):
        for value in values[1:]:
            result = functions[op](result, value)
        result = result / len(values) if op is ReduceOp.AVG else result
        return np.asarray(result, values[0].dtype) if lib is np else result


def raw(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return bytes(value.tobytes())


def check(result: Any, expected: Any, like: Any) -> None:
    """Same kind, dtype, shape and numbers; own memory, writable."""
    assert type(result) is type(like)
    assert result.dtype == like.dtype
    assert tuple(result.shape) == tuple(expected.shape)
    if isinstance(result, torch.Tensor):
        assert result.is_contiguous()
        assert not result.requires_grad
        if result.dtype in RARE_DTYPES:
            assert raw(result) == raw(expected)
            return
        exact = torch.complex128 if result.is_complex() else torch.float64
        result, expected = result.to(exact).numpy(), expected.to(exact).numpy()
    else:
        assert result.flags.writeable
        assert result.flags.c_contiguous
    loose = result.dtype.kind == "c"  # libraries may fuse the multiplications of a product and round once less
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(result, expected, rtol=1e-5 if loose else 0, atol=1e-5 if loose else 0)


def same_bits(results: list[tuple[Any, ...]]) -> None:
    first, *others = ([raw(value) for value in rank] for rank in results)
    assert all(other == first for other in others)


def failures(results: list[tuple[Any, ...]]) -> list[Failure]:
    """Every rank got the same failure, in place of each of its values."""
    found = [value for rank in results for value in rank]
    assert all(type(value) is Failure for value in found)
    # Each names its own node; what is wrong, and with which tensors, is one text.
    assert len({value.message.partition(", execution ")[2] for value in found}) == 1
    return found


def tensors_of(dtype: Any, shape: tuple[int, ...], count: int, rng: np.random.Generator) -> list[Any]:
    if isinstance(dtype, str):
        return [numbers(shape, dtype, rng) for _ in range(count)]
    bits = {torch.bfloat16: "f4", torch.bool: "?"}
    known = dtype in TORCH_DTYPES and dtype not in bits
    name = str(dtype).removeprefix("torch.") if known else bits.get(dtype, "f4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32 being experimental
        return [torch.from_numpy(numbers(shape, name, rng)).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [*TORCH_DTYPES, *NUMPY_DTYPES], ids=str)
def test_reductions(world: World, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    if isinstance(dtype, str):
        kind = np.dtype(dtype).kind
    else:
        kind = "b" if dtype is torch.bool else "c" if dtype.is_complex else "f" if dtype.is_floating_point else "i"
    for op, shape in itertools.product(ReduceOp, SHAPES):
        given = tensors_of(dtype, shape, world.size, rng)
        results = world.run(CollectiveKind.ALLREDUCE, op, [(value,) for value in given])
        if not fits(op, kind):
            failure = failures(results)[0]
            assert isinstance(failure.exception, CollectiveError)
            assert f"{op.name} is not for" in failure.message
            continue
        expected = reduced(op, given)
        for (result,) in results:
            check(result, expected, given[0])
        same_bits(results)
        if shape and shape[0] % world.size == 0:
            part = shape[0] // world.size
            scattered = world.run(CollectiveKind.REDUCESCATTER, op, [(value,) for value in given])
            for rank, (result,) in enumerate(scattered):
                check(result, expected[rank * part : (rank + 1) * part], given[0])


def test_gather_and_broadcast(world: World, seed: int) -> None:
    """Every dtype, also those that no library calculates with: only bytes move."""
    rng = np.random.default_rng(seed)
    dtypes: list[Any] = [*TORCH_DTYPES, *RARE_DTYPES, *NUMPY_DTYPES]
    for dtype, shape in itertools.product(dtypes, SHAPES):
        given = tensors_of(dtype, shape, world.size, rng)
        results = world.run(CollectiveKind.BROADCAST, None, [(value,) for value in given])
        for (result,) in results:
            check(result, given[-1], given[0])
            assert raw(result) == raw(given[-1])
        if shape:
            results = world.run(CollectiveKind.ALLGATHER, None, [(value,) for value in given])
            for (result,) in results:
                assert raw(result) == b"".join(map(raw, given))
                assert tuple(result.shape) == (shape[0] * world.size, *shape[1:])
                assert result.dtype == given[0].dtype


def test_dtypes_that_torch_may_not_calculate_with(world: World, seed: int) -> None:
    """Either the result is right, or every rank says that torch cannot; never anything else."""
    rng = np.random.default_rng(seed)
    for dtype, op in itertools.product(RARE_DTYPES, ReduceOp):
        given = tensors_of(dtype, (8,), world.size, rng)
        results = world.run(CollectiveKind.ALLREDUCE, op, [(value,) for value in given])
        if type(results[0][0]) is Failure:
            assert isinstance(failures(results)[0].exception, CollectiveError)
        else:
            same_bits(results)
            if world.size == 1 and op is not ReduceOp.AVG:
                assert raw(results[0][0]) == raw(given[0])


@pytest.mark.parametrize(("size", "share_from"), [(2, 1), (4, 1), (4, 1 << 40)])
def test_several_tensors_per_actor(size: int, share_from: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SHARE_FROM_BYTES", share_from)
    rng = np.random.default_rng(seed)
    with World(size, tensors=3) as world:
        for dtype in (torch.float32, torch.bfloat16, "i4"):
            given = [tuple(tensors_of(dtype, shape, 1, rng)[0] for shape in ((), (5, 3), (0, 2))) for _ in range(size)]
            results = world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, given)
            for place in range(3):
                expected = reduced(ReduceOp.SUM, [values[place] for values in given])
                for values in results:
                    check(values[place], expected, given[0][place])
            same_bits(results)
        mixed = [(torch.ones(2), torch.ones(2), torch.ones(2).double())] * size
        failure = failures(world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, mixed))[0]
        assert "the tensors of one actor must have one kind and dtype" in failure.message
        assert "rank 0 (W0): torch float32 (2,) and torch float32 (2,) and torch float64 (2,)" in failure.message


def test_large_tensors_take_the_way_through_parts(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Sizes just below and from the limit, not divisible by the ranks; the results do not show which way they took."""
    taken: list[str] = []
    for name in ("_alone", "_in_parts"):
        original = getattr(collectives.Exchange, name)

        def spy(self: Any, *args: Any, _name: str = name, _original: Any = original) -> Any:
            taken.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(collectives.Exchange, name, spy)
    rng = np.random.default_rng(seed)
    limit = collectives.SHARE_FROM_BYTES // 4
    with World(4) as world:
        for elements, way in ((limit - 1, "_alone"), (limit, "_in_parts"), (limit * 4 + 3, "_in_parts")):
            given = [torch.from_numpy(rng.normal(size=elements).astype("f4")) for _ in range(4)]
            results = world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, [(value,) for value in given])
            assert taken == [way] * 4
            taken.clear()
            check(results[0][0], reduced(ReduceOp.SUM, given), given[0])
            same_bits(results)
            assert all(arena.core.pool_in_use == 0 for arena in world.arenas)  # views were let go within the step


def test_layouts_and_flags_of_what_is_given() -> None:
    """Strides, negated and conjugated views, read-only and gradient-carrying tensors: only the numbers count."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    with World(2) as world:
        for view in (base.t(), base[::2, 1::2], base.expand(2, 4, 6), base.imag if base.is_complex() else base[:, :1]):
            ((result,), _) = world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, [(view,), (view.clone(),)])
            check(result, view + view, view)
        lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
        ((result,), _) = world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, [(lazy,), (lazy.imag * 1j,)])
        check(result, lazy + lazy.imag * 1j, lazy.resolve_conj())
        leaf = torch.nn.Parameter(torch.ones(3))
        ((result,), _) = world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, [(leaf,), (torch.ones(3),)])
        check(result, torch.full((3,), 2.0), torch.ones(3))
        frozen = np.arange(6.0).reshape(2, 3)[:, ::-1]
        frozen.flags.writeable = False
        ((result,), _) = world.run(CollectiveKind.ALLREDUCE, ReduceOp.SUM, [(frozen,), (frozen,)])
        check(result, frozen * 2, frozen.copy())


def test_results_are_nobody_elses_memory() -> None:
    with World(2) as world:
        for kind, op in (
            (CollectiveKind.ALLREDUCE, ReduceOp.MAX),
            (CollectiveKind.BROADCAST, None),
            (CollectiveKind.ALLGATHER, None),
        ):
            given = [torch.ones(50_000), torch.ones(50_000)]
            ((first,), (second,)) = world.run(kind, op, [(value,) for value in given])
            first += 1
            assert bool((second == 1).all())
            assert all(bool((value == 1).all()) for value in given)
