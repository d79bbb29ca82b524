"""Tensors: every dtype, layout, flag and lifetime, and the kinds that are kept exactly or refused by name."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from raycomm import _core
from raycomm.codec import decode, encode, message
from raycomm.codec import tensor as codec_tensor
from raycomm.codec.message import DTYPE_NAMES
from raycomm.errors import SerializationError
from tests.unit.strategies import TORCH_DTYPES, bits_of, equal, tensors, torch_of


def carried(value: Any) -> Any:
    payload, buffers = encode(value)
    return decode(payload, [bytearray(buffer) for buffer in buffers])


def ext_code(payload: bytes) -> int:
    return payload[{0xC7: 3, 0xC8: 4, 0xC9: 6}.get(payload[1], 2)]


def raw_of(dtype: torch.dtype, count: int) -> bytes:
    raw = bytes((37 * index + 11) % 256 for index in range(count * dtype.itemsize))
    return bytes(byte & 1 for byte in raw) if dtype is torch.bool else raw


TENSORS_OF_A_GPU = [
    torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.arange(12.0).reshape(3, 4)[:, ::2],
    torch.tensor(3, dtype=torch.uint8),
    torch.zeros(0, 3),
    torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    torch.ones(2, 2, requires_grad=True),
]


@settings(max_examples=300, deadline=None)
@given(tensors())
def test_any_tensor_arrives_equal(value: torch.Tensor) -> None:
    payload, buffers = encode(value)
    assert sum(len(buffer) for buffer in buffers) == value.numel() * value.dtype.itemsize
    assert equal(value, decode(payload, [bytearray(buffer) for buffer in buffers]))


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_is_bit_exact(dtype: torch.dtype) -> None:
    assert str(dtype).removeprefix("torch.") in DTYPE_NAMES.values()
    value = torch_of(raw_of(dtype, 24), dtype, (2, 3, 4))
    for view in (value, value.permute(2, 0, 1), value[:, ::2], value[1:, 1], value[0, 0, 0], value[:0], value.expand(2, 2, 3, 4)):
        assert equal(view, carried(view))
    assert bits_of(carried(value)) == raw_of(dtype, 24)
    assert equal(torch.nn.Parameter(value, requires_grad=False), carried(torch.nn.Parameter(value, requires_grad=False)))


def test_every_torch_dtype_is_in_the_table_or_quantized() -> None:
    dtypes = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    known = {getattr(torch, name) for name in DTYPE_NAMES.values() if hasattr(torch, name)}
    assert {str(dtype) for dtype in dtypes - known} <= {
        f"torch.{name}" for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
    }


def test_no_dtype_warns_in_a_fresh_process() -> None:
    code = (
        "import torch; from raycomm.codec import decode, encode\n"
        "for name in ('complex32', 'bfloat16', 'float8_e5m2', 'int4', 'bits8'):\n"
        "    x = torch.frombuffer(bytearray(range(48)), dtype=getattr(torch, name))\n"
        "    for v in (x, x[::2], x[:0], x[0], x.reshape(2, -1).t(), x.conj() if x.is_complex() else x):\n"
        "        p, b = encode([v]); decode(p, [bytearray(i) for i in b]); decode(p, [bytes(i) for i in b])\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)


def test_layouts() -> None:
    image = torch.arange(120.0).reshape(2, 3, 4, 5)
    last = image.contiguous(memory_format=torch.channels_last)
    assert carried(last).is_contiguous(memory_format=torch.channels_last)
    assert carried(last).stride() == last.stride()
    one = torch.arange(60.0).reshape(1, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert carried(one).stride() == one.stride()
    deep = torch.arange(240.0).reshape(2, 3, 2, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    assert carried(deep).is_contiguous(memory_format=torch.channels_last_3d)
    for view in (image.t_() if image.dim() < 3 else image.transpose(0, 3), last[:, :, 1:], last[1:], image[..., 0], image.mT):
        assert equal(view, carried(view))


def test_only_viewed_elements_travel() -> None:
    large = torch.zeros(1000, 1000)
    for view, count in ((large[5], 1000), (large[:, 3], 1000), (large[::100, ::100], 100), (torch.zeros(1).expand(50, 2), 100)):
        payload, (buffer,) = encode(view)
        assert len(buffer) == 4 * count
        assert equal(view, decode(payload, [bytearray(buffer)]))


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conj_and_neg_are_resolved(dtype: torch.dtype) -> None:
    half = dtype.itemsize // 2
    value = torch_of(raw_of(dtype, 6), dtype, (2, 3))
    flipped = bytearray(raw_of(dtype, 6))
    for last in range(2 * half - 1, len(flipped), 2 * half):
        flipped[last] ^= 0x80
    arrived = carried(value.conj())
    assert bits_of(arrived) == flipped
    assert not arrived.is_conj()
    if dtype is not torch.complex32:
        for view in (value.conj().imag, torch._neg_view(value), torch._neg_view(value.conj()), value.conj().t()):
            assert equal(view, carried(view))
            assert not carried(view).is_neg()


def test_flags() -> None:
    leaf = torch.ones(3, requires_grad=True)
    for value in (leaf, leaf * 2, leaf[1:]):
        arrived = carried(value)
        assert arrived.is_leaf
        assert arrived.requires_grad
        assert arrived.grad_fn is None
    for requires_grad in (True, False):
        arrived = carried(torch.nn.Parameter(torch.ones(2, 2).t(), requires_grad=requires_grad))
        assert type(arrived) is torch.nn.Parameter
        assert arrived.requires_grad is requires_grad
    arrived = carried(leaf)
    arrived.sum().backward()
    assert arrived.grad.tolist() == [1, 1, 1]
    with torch.inference_mode():
        assert equal(torch.ones(3), carried(torch.ones(3)))
        assert carried(torch.nn.Parameter(torch.ones(2))).requires_grad


def test_default_device_does_not_matter() -> None:
    torch.set_default_device("meta")
    try:
        arrived = carried([torch.ones(2, device="cpu"), torch.ones(0, device="cpu"), torch.ones(2, 2, device="cpu")[:, :1]])
    finally:
        torch.set_default_device(None)
    assert [item.device.type for item in arrived] == ["cpu"] * 3


def test_identity_inside_one_message() -> None:
    shared, other = torch.arange(5), torch.arange(5)
    payload, buffers = encode([shared, other, {"again": (shared,)}])
    assert len(buffers) == 2
    arrived = decode(payload, [bytearray(buffer) for buffer in buffers])
    assert arrived[0] is arrived[2]["again"][0]
    assert arrived[0] is not arrived[1]


def test_writable_buffers_are_shared_and_kept_alive() -> None:
    class Block(bytearray):
        pass

    payload, (buffer,) = encode(torch.arange(4))
    block = Block(buffer)
    gone = weakref.ref(block)
    arrived = decode(payload, [block])
    block[0] = 9
    assert arrived[0] == 9
    view = arrived[1:]
    del block, arrived
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_read_only_buffers_are_copied() -> None:
    payload, (buffer,) = encode([torch.arange(4), torch.nn.Parameter(torch.ones(2))][0])
    memory = bytes(buffer)
    arrived = decode(payload, [memory])
    arrived += 1
    assert memory == bytes(buffer)
    assert decode(payload, [memoryview(bytearray(memory)).toreadonly()]).tolist() == [0, 1, 2, 3]


def test_encoding_aliases_and_does_not_change() -> None:
    value = torch.arange(4)
    _, (buffer,) = encode(value)
    value[0] = 77
    assert buffer[0] == 77
    before = (value.stride(), value.storage_offset(), value.untyped_storage().nbytes(), value._version)
    encode(value[::2])
    encode(value.expand(2, 4))
    assert before == (value.stride(), value.storage_offset(), value.untyped_storage().nbytes(), value._version)


def test_freed_storage_is_an_error() -> None:
    value = torch.ones(10)
    value.untyped_storage().resize_(0)
    with pytest.raises(SerializationError) as caught:
        encode({"w": value})
    assert caught.value.path == "value['w']"
    assert value.untyped_storage().nbytes() == 0


class Subclass(torch.Tensor):
    pass


def pickled_tensors() -> list[torch.Tensor]:
    tagged = torch.arange(4).to(torch.uint16).reshape(2, 2).t()
    tagged.tag = {"a": 1}
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "x"
    return [
        *(tagged, parameter, torch.ones(3).as_subclass(Subclass), torch.empty(3, 2, device="meta")),
        *(torch.eye(3).to_sparse(), torch.nn.Buffer(torch.ones(2))),
    ]


@pytest.mark.parametrize("value", pickled_tensors(), ids=lambda value: type(value).__name__)
def test_other_kinds_are_kept_by_pickle(value: torch.Tensor) -> None:
    payload, buffers = encode(value)
    arrived = decode(payload, [bytearray(buffer) for buffer in buffers])
    assert type(arrived) is type(value)
    assert (arrived.dtype, arrived.shape, arrived.layout, arrived.device) == (
        value.dtype,
        value.shape,
        value.layout,
        value.device,
    )
    assert arrived.__dict__ == value.__dict__
    if value.device.type == "cpu":
        assert torch.equal(arrived.to_dense(), value.to_dense())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_compressed_tensors() -> None:
    for value in (
        *(
            torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
            torch.eye(3).to_sparse_csr(),
            torch.eye(4).to_sparse_csc(),
        ),
        torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    ):
        arrived = carried(value)
        assert (arrived.dtype, arrived.layout, arrived.is_nested) == (value.dtype, value.layout, value.is_nested)
        assert str(arrived) == str(value)
    with pytest.raises(SerializationError) as caught:
        encode([torch.ones(3).to_mkldnn()])
    assert caught.value.path == "value[0]"


def test_a_subclass_that_comes_back_plain_is_refused() -> None:
    with pytest.raises(SerializationError) as caught:
        encode((1, torch.ones(2).as_subclass(Forgetful)))
    assert caught.value.path == "value[1]"
    assert "same type" in str(caught.value)


class Forgetful(torch.Tensor):
    def __reduce_ex__(self, protocol: int) -> Any:
        return torch.ones, (2,)


class OnGpu(torch.Tensor):
    """What the codec sees of a GPU tensor, on a machine without one."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: [Holder(value)]])
def test_gpu_tensors_that_are_not_plain_are_refused_by_name(wrap: Any) -> None:
    with pytest.raises(
        SerializationError, match=r"on a GPU only plain dense tensors .* this one is OnGpu; send value\.cpu"
    ) as caught:
        encode(wrap(torch.ones(2).as_subclass(OnGpu)))
    assert caught.value.path in ("value[0]", "value[0].tensor")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, host memory counts as that of a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(codec_tensor, "_GPU", "cpu")
        monkeypatch.setattr(codec_tensor, "has_gpu", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tensor", TENSORS_OF_A_GPU, ids=str)
def test_gpu_tensors_go_through_host_memory(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = tensor.to(codec_tensor._GPU)
    sent.requires_grad_(tensor.requires_grad)
    head, raw = codec_tensor.encode(sent, 0)
    assert head[2] == message.DEVICE_CUDA
    came = codec_tensor.decode(memoryview(head), raw, 0)
    assert (came.device.type, came.dtype, came.shape, came.requires_grad) == (
        codec_tensor._GPU,
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )
    assert torch.equal(came.cpu().resolve_conj(), tensor.resolve_conj())
    with monkeypatch.context() as without:
        without.setattr(codec_tensor, "has_gpu", lambda: False)
        assert codec_tensor.decode(memoryview(head), raw, 0).device.type == "cpu"


@pytest.mark.usefixtures("gpu")
def test_whole_messages_with_gpu_tensors() -> None:
    """The native codec leaves them to the other one: written here by a tensor's wish for its gradient, which it does not know."""
    tensor = torch.arange(6.0).requires_grad_().to(codec_tensor._GPU)
    payload, buffers = encode({"t": tensor, "again": tensor, "n": 3})
    with pytest.raises(RuntimeError, match="bad_cast"):
        _core.decode(bytes(payload), [bytearray(buffer) for buffer in buffers])
    came = decode(bytes(payload), [bytearray(buffer) for buffer in buffers])
    assert came["t"] is came["again"]
    assert torch.equal(came["t"].cpu(), tensor.detach().cpu())
    assert came["n"] == 3


@pytest.mark.parametrize("device", [2, 255])
def test_unknown_devices_are_refused(device: int) -> None:
    head, raw = codec_tensor.encode(torch.ones(2), 0)
    head = head[:2] + bytes((device,)) + head[3:]
    with pytest.raises(SerializationError, match=f"device kind {device}"):
        codec_tensor.decode(memoryview(head), raw, 0)


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_inside_pickled_objects(dtype: torch.dtype) -> None:
    value = torch_of(raw_of(dtype, 6), dtype, (2, 3)).t()
    held = Holder(value)
    payload, buffers = encode([held, copy.copy(held)])
    assert [len(buffer) for buffer in buffers] == [6 * dtype.itemsize] * 2
    assert equal(value, decode(payload, [bytearray(buffer) for buffer in buffers])[0].tensor)
    assert equal(value, decode(payload, [bytes(buffer) for buffer in buffers])[1].tensor)


def test_vmap_tensors_are_an_error_not_a_crash() -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(SerializationError):
            encode(row)
        return row

    torch.vmap(inside)(torch.ones(2, 3))
    assert ext_code(encode(torch.ones(1))[0]) == 9
