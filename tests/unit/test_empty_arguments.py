"""What `raycomm.empty` and `graph.empty` take for a shape and a dtype, and what they say to anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raycomm.errors import ArgumentError
from raycomm.runtime.lending import filled_by


class Lender:
    """Lends memory of this process, and remembers how much."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Any:
        self.sizes.append(size)
        return bytearray(size)


@pytest.mark.parametrize(
    "dtype", [np.uint8, "f4", np.dtype("c16"), np.dtype([("a", "u1"), ("b", "i8")]), torch.float32, torch.bool]
)
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (3, (3,)),
        (0, (0,)),
        ((), ()),
        ((2, 3), (2, 3)),
        ([4, 0, 2], (4, 0, 2)),
        (range(1, 3), (1, 2)),
        (np.int64(4), (4,)),
        (np.uint8(4), (4,)),
        ([np.int8(2), 3], (2, 3)),
        (np.array([2, 2]), (2, 2)),
        (np.array(5), (5,)),
        (torch.Size([2, 1]), (2, 1)),
        (torch.tensor(3), (3,)),
        (torch.tensor([3, 2]), (3, 2)),
    ],
)
def test_shapes(shape: Any, sizes: tuple[int, ...], dtype: Any) -> None:
    lend = Lender()
    made = filled_by(lend, shape, dtype)
    assert tuple(made.shape) == sizes
    assert made.dtype == (dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype))
    count, item = int(np.prod(sizes)), made.dtype.itemsize
    assert lend.sizes == ([count * item] if count else [])


@pytest.mark.parametrize("dtype", [np.uint8, torch.float32, "f8"])
@pytest.mark.parametrize(
    "shape",
    [
        "x",
        "",
        b"3",
        2.5,
        (2.5,),
        None,
        (None,),
        True,
        (True,),
        {2},
        {2: 3},
        ("a",),
        ((2, 3),),
        np.array([1.5]),
        np.array([[2]]),
        2j,
    ],
)
def test_no_shape(shape: Any, dtype: Any) -> None:
    lend = Lender()
    with pytest.raises(TypeError, match=r"raycomm.empty: .* is no shape; give an integer of at least 0, or a sequence of such"):
        filled_by(lend, shape, dtype)
    assert lend.sizes == []


@pytest.mark.parametrize("dtype", [np.uint8, torch.float32, "f8"])
@pytest.mark.parametrize("shape", [-1, (-1,), (2, -3), (0, -1), (-2, -3), np.int8(-4), 1 << 64, (1 << 40, 1 << 40)])
def test_sizes_that_cannot_be(shape: Any, dtype: Any) -> None:
    lend = Lender()
    with pytest.raises(ArgumentError, match="raycomm.empty: shape") as caught:
        filled_by(lend, shape, dtype)
    assert caught.value.expected
    assert caught.value.given
    assert lend.sizes == []


@pytest.mark.parametrize("dtype", ["nope", 3.5, object(), (1, 2, 3), lambda: None])
def test_no_dtype(dtype: Any) -> None:
    lend = Lender()
    with pytest.raises(TypeError, match=r"is no dtype; give a torch.dtype, or what numpy.dtype takes"):
        filled_by(lend, 3, dtype)
    assert lend.sizes == []
