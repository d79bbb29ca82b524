"""torch tensors: bit exact for every dtype in the table, in their own layout, zero-copy on the way in.

Bytes are reached, and tensors built, through `set_` on a storage. It is the only way that works for every dtype: DLPack,
`numpy()` and the copy kernels each refuse some of them, and `torch.empty` warns for complex32.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from raycomm.codec.message import (
    DEVICE_CPU,
    DEVICE_CUDA,
    DTYPE_NAMES,
    IS_PARAMETER,
    REQUIRES_GRAD,
    check_layout,
    is_dense,
    malformed,
    pack_head,
    unpack_head,
)
from raycomm.errors import SerializationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GPU: Final = "cuda"
_KNOWN_FLAGS: Final = 1 | REQUIRES_GRAD | IS_PARAMETER
# A torch older than the table lacks some of these.
_DTYPES: Final[dict[int, torch.dtype]] = {
    code: getattr(torch, name) for code, name in DTYPE_NAMES.items() if hasattr(torch, name)
}
_CODES: Final[dict[torch.dtype, int]] = {dtype: code for code, dtype in _DTYPES.items()}
# A dtype of the same size that every copy kernel knows, to compact views of dtypes that have no kernel.
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_COMPLEX32: Final = torch.complex32
# Named tensors left torch; where they exist, the names would be lost.
_HAS_NAMES: Final[Any] = getattr(torch.Tensor, "has_names", None)


def is_exact(value: object) -> bool:
    """Whether `value` is a torch.Tensor or nn.Parameter and not a subclass of either."""
    kind = type(value)
    return kind is torch.Tensor or kind is torch.nn.Parameter


def goes_raw(value: torch.Tensor, *, attributes: bool = False) -> bool:
    """Whether the TENSOR format holds `value` exactly; otherwise pickle may.

    Args:
        attributes: the caller carries user attributes itself.

    Raises:
        SerializationError: the tensor is on another device, or on a GPU in a form that pickle would only take to the same GPU.
    """
    device = value.device.type
    if device not in ("cpu", _GPU, "meta"):
        raise SerializationError(f"a tensor on {device!r} cannot be sent; send value.cpu()")
    raw = (
        is_exact(value)
        and device != "meta"
        and value.layout is torch.strided
        and value.dtype in _CODES
        and not value.is_nested
        and not (_HAS_NAMES is not None and _HAS_NAMES(value))
    )
    if device == _GPU and not raw:
        kind = type(value).__name__ if value.layout is torch.strided else str(value.layout).removeprefix("torch.")
        raise SerializationError(f"on a GPU only plain dense tensors can be sent, and this one is {kind}; send value.cpu()")
    return raw and (attributes or not value.__dict__)


def encode(value: torch.Tensor, index: int) -> tuple[bytes, memoryview]:
    """The TENSOR body and the buffer. The buffer aliases the tensor where its elements lie dense; that of a tensor on a GPU is a
    copy in host memory, for which this blocks until the GPU has come so far."""
    flags = (REQUIRES_GRAD if value.requires_grad else 0) | (IS_PARAMETER if type(value) is torch.nn.Parameter else 0)
    dtype = value.dtype
    plain = value.detach()
    device = DEVICE_CPU
    if value.device.type == _GPU:
        _check_storage(plain)
        device, plain = DEVICE_CUDA, plain.cpu()
    flips = dtype is _COMPLEX32 and (plain.is_conj(), plain.is_neg())
    if not flips:
        plain = plain.resolve_conj().resolve_neg()
    shape, strides = tuple(plain.shape), None
    if plain.numel() == 0:
        return pack_head(_CODES[dtype], flags, index, shape, None, device), memoryview(b"")
    _check_storage(plain)
    if not plain.is_contiguous():
        strides = plain.stride()
        if not is_dense(shape, strides):
            carrier = _empty(_CARRIERS[dtype.itemsize])
            plain = carrier.set_(plain.untyped_storage(), plain.storage_offset(), shape, strides).contiguous()
            strides = None
    raw = _raw_bytes(plain)
    if flips and any(flips):
        raw = _flip_signs(raw, conj=flips[0], neg=flips[1])
    return pack_head(_CODES[dtype], flags, index, shape, strides, device), raw.data


def decode(body: memoryview, buffer: memoryview, index: int) -> torch.Tensor:
    """The tensor, on top of `buffer` if that is writable, else on a private copy: torch cannot be kept from writing.

    One that comes from a GPU goes to that of this process, torch's current one, and stays in host memory if there is none.
    """
    head, rest = unpack_head(body)
    dtype = _DTYPES.get(head.dtype)
    if dtype is None:
        name = DTYPE_NAMES.get(head.dtype)
        raise (
            malformed(f"tensor dtype code {head.dtype}")
            if name is None
            else SerializationError(f"this torch has no dtype {name}")
        )
    if head.flags & ~_KNOWN_FLAGS or len(rest) or head.buffer != index:
        raise malformed("flags, length or buffer index of a tensor")
    check_layout(head, dtype.itemsize, len(buffer))
    if head.strides is not None and min(head.strides) < 0:  # only a size-1 dim can still have one, and torch has none
        raise malformed(f"strides {head.strides} of a tensor")
    # frombuffer refuses zero bytes, so an empty tensor stands on a spare element.
    memory = buffer if len(buffer) and not buffer.readonly else bytearray(buffer or dtype.itemsize)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    value = _empty(dtype)
    if head.strides is None:
        value.set_(storage, 0, head.shape)  # type: ignore[call-overload]
    else:
        value.set_(storage, 0, head.shape, head.strides)
    if head.device == DEVICE_CUDA and has_gpu():
        value = value.to(_GPU)
    requires_grad = bool(head.flags & REQUIRES_GRAD)
    if head.flags & IS_PARAMETER:
        return torch.nn.Parameter(value, requires_grad=requires_grad)
    return value.requires_grad_() if requires_grad else value


@functools.cache
def has_gpu() -> bool:
    """Whether this process has one that torch can use. torch takes a while to say so: for each message it would count."""
    return torch.cuda.is_available()


def same(sent: object, arrived: object) -> bool:
    """Whether a pickled tensor came back as it was: type, dtype, shape, layout, device, attributes and value."""
    if type(sent) is not type(arrived) or not isinstance(sent, torch.Tensor) or not isinstance(arrived, torch.Tensor):
        return False
    for name in ("dtype", "layout", "device", "requires_grad", "is_nested", "is_quantized"):
        if getattr(sent, name) != getattr(arrived, name):
            return False
    if sent.__dict__.keys() != arrived.__dict__.keys():
        return False
    if sent.device.type == "meta":
        return sent.shape == arrived.shape and sent.stride() == arrived.stride()
    try:
        pieces, others = _pieces(sent), _pieces(arrived)
    except (RuntimeError, ValueError, NotImplementedError):  # an uninitialized parameter, a class that refuses to be looked into
        return True
    return len(pieces) == len(others) and all(_same_bits(a, b) for a, b in zip(pieces, others, strict=True))


def _pieces(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that `value` is made of; empty where only its class knows."""
    value = value.detach()
    if value.is_quantized:
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [
                value.int_repr(),
                torch.tensor(value.q_scale(), device="cpu"),
                torch.tensor(value.q_zero_point(), device="cpu"),
            ]
        return [value.int_repr(), value.q_per_channel_scales(), value.q_per_channel_zero_points()]
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values(), torch.tensor([*value.shape, value.is_coalesced()], device="cpu")]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values(), torch.tensor(value.shape, device="cpu")]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values(), torch.tensor(value.shape, device="cpu")]
    if value.is_nested:
        return list(value.unbind()) if type(value) is torch.Tensor else []
    return [value.as_subclass(torch.Tensor)] if value.untyped_storage().nbytes() or not value.numel() else []


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    (head, bits), (other_head, other_bits) = encode(a, 0), encode(b, 0)
    return head == other_head and bits == other_bits


def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)


def _check_storage(value: torch.Tensor) -> None:
    """A storage freed with `resize_(0)` leaves its tensors their shapes: reading goes out of bounds, `set_` would resize it."""
    reach = value.storage_offset() + 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    held = value.untyped_storage().nbytes()
    if reach * value.dtype.itemsize > held:
        raise SerializationError(f"the tensor reaches past its storage of {held} bytes (was the storage freed?)")


def _raw_bytes(value: torch.Tensor) -> NDArray[Any]:
    itemsize = value.dtype.itemsize
    raw = _empty(torch.uint8)
    raw.set_(value.untyped_storage(), value.storage_offset() * itemsize, (value.numel() * itemsize,))  # type: ignore[call-overload]
    array: NDArray[Any] = raw.numpy()
    return array


def _flip_signs(raw: NDArray[Any], *, conj: bool, neg: bool) -> NDArray[Any]:
    """Resolve the conj and neg bits of complex32, for which torch's own kernels warn."""
    halves: NDArray[Any] = raw.copy().view("<u2").reshape(-1, 2)
    if neg:
        halves ^= 0x8000
    if conj:
        halves[:, 1] ^= 0x8000
    return halves.reshape(-1).view("u1")
