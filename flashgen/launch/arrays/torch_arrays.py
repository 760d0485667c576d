"""torch tensors: read through their own methods, allocated by torch, launched on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import HOST, ArrayInfo, contiguous_strides, dtype_name

_PLAIN = (
    (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if hasattr(torch.nn, "Buffer")
    else (
        torch.Tensor,
        torch.nn.Parameter,
    )
)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_DTYPES |= {"e4m3": torch.float8_e4m3fn}


#: What torch's compiler makes its tensors with: on the current device, without the dispatcher, in half the time.
_empty_on_gpu: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


#: Of one tensor in a signature.
_TRAITS = 8


def _raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _no_device() -> None:
    """Where torch knows no GPUs, or none of the quick ways."""


class TorchArrays:
    """Adapter for plain torch tensors."""

    name = "torch"

    def __init__(self) -> None:
        # The raw getter spares building a Stream object at every launch.
        self._current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
        current = None if _empty_on_gpu is None else getattr(torch._C, "_cuda_getDevice", None)
        self._current_device: Callable[[], int | None] = current or _no_device

    @staticmethod
    def check_type(kind: type) -> None:
        """Tensor subclasses may hold no memory of their own (DTensor, FakeTensor), so they are refused."""
        if kind not in _PLAIN:
            raise ArgumentError(
                f"{kind.__qualname__} is a tensor subclass; pass plain torch.Tensors, or call "
                "flashgen.torch.attention, which goes through torch's dispatcher"
            )

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """``_TRAITS`` traits of each tensor, one tensor behind the other; and the addresses."""
        # This runs at every call: a flat tuple is quicker to make and to hash than one per tensor, and quickest
        # without a loop, for the three last tensors, which most calls have no others than.
        q, k, v = arrays[-3:]
        a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
        key: tuple[Any, ...] = (
            *(a & 15 if a else None, q.shape, q.stride(), q.dtype, q.get_device(), q.is_cuda, q.is_neg(), type(q)),
            *(b & 15 if b else None, k.shape, k.stride(), k.dtype, k.get_device(), k.is_cuda, k.is_neg(), type(k)),
            *(c & 15 if c else None, v.shape, v.stride(), v.dtype, v.get_device(), v.is_cuda, v.is_neg(), type(v)),
        )
        if len(arrays) == 3:
            return key, (a, b, c)
        before: tuple[Any, ...] = ()
        pointers: tuple[int, ...] = ()
        for x in arrays[:-3]:
            pointer = x.data_ptr()
            pointers += (pointer,)
            before += (pointer & 15 if pointer else None, x.shape, x.stride(), x.dtype)
            before += (x.get_device(), x.is_cuda, x.is_neg(), type(x))
        return before + key, (*pointers, a, b, c)

    def describe(self, names: Sequence[str], signature: Any) -> list[ArrayInfo]:
        """The tensors of a signature."""
        each = zip(*[iter(signature)] * _TRAITS, strict=True)
        return [_info(name, *traits) for name, traits in zip(names, each, strict=True)]

    def layout(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Shape, strides and torch's element type."""
        return shape, contiguous_strides(shape), _DTYPES[dtype]

    def allocate(self, like: Any, layouts: Sequence[Any], stream: int) -> tuple[list[Any], list[int]]:
        """From torch's caching allocator, so that streams and graphs are torch's concern."""
        if like.is_cuda and like.get_device() == self._current_device():
            made = [_empty_on_gpu(*layout) for layout in layouts]
        else:
            made = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in layouts]
        return made, [x.data_ptr() for x in made]

    def stream(self, device: int, requested: Any) -> int:
        """torch's current stream of the device."""
        if requested is not None:
            raise ArgumentError("stream= is not for torch tensors; wrap the call in 'with torch.cuda.stream(stream):'")
        return 0 if device == HOST else self._current_stream(device)


def _info(
    name: str,
    bits: int | None,
    shape: Any,
    strides: Any,
    dtype: Any,
    index: int,
    is_cuda: bool,
    is_negated: bool,
    kind: type,
) -> ArrayInfo:
    if index != HOST and not is_cuda:
        raise ArgumentError(f"{name} is on a device that is no NVIDIA GPU; pass a tensor on one (device 'cuda')")
    if bits is None and 0 not in shape:
        raise ArgumentError(f"{name} has no memory, as meta and fake tensors; pass a tensor that has")
    if is_negated or dtype.is_complex:
        what = "is a negated view" if is_negated else f"is {dtype}"
        raise ArgumentError(f"{name} {what}; pass real numbers as they lie in memory: {name}.resolve_neg()")
    TorchArrays.check_type(kind)
    return ArrayInfo(name, bits or 0, tuple(shape), tuple(strides), dtype_name(str(dtype)), index)
