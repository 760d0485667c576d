"""torch tensors: read through their own methods, allocated by torch, launched on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.launch.array import HOST, ArrayInfo, contiguous_strides, dtype_name

_PLAIN = (
    (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if hasattr(torch.nn, "Buffer")
    else (
        torch.Tensor,
        torch.nn.Parameter,
    )
)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


#: What torch's compiler makes its tensors with: on the current device, without the dispatcher, in half the time.
_empty_on_gpu: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


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
        """Types, shapes, strides, dtypes, devices and low address bits; and the addresses."""
        # This runs at every call: flat tuples are quicker to make and to hash than one per tensor, and quickest
        # without a loop, for the three last tensors, which most calls have no others than.
        q, k, v = arrays[-3:]
        pointers: tuple[int, ...] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        bits = pointers[0] & 15, pointers[1] & 15, pointers[2] & 15
        layout = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
        place = q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device()
        types = type(q), type(k), type(v)
        if len(arrays) == 3:
            return (bits, layout, place, types), pointers
        key: tuple[Any, ...] = bits, layout, place, types
        before: tuple[int, ...] = ()
        for a in arrays[:-3]:
            pointer = a.data_ptr()
            before += (pointer,)
            key += (pointer & 15, a.shape, a.stride(), a.dtype, a.get_device(), type(a))
        return key, before + pointers

    def describe(self, name: str, array: Any) -> ArrayInfo:
        """Everything about one tensor."""
        if array.layout is not torch.strided:
            raise ArgumentError(f"{name} has layout {array.layout}; pass a strided (dense) tensor")
        if array.device.type not in ("cuda", "cpu"):
            raise ArgumentError(f"{name} is on {array.device}; pass a tensor on an NVIDIA GPU (device 'cuda')")
        device = array.get_device() if array.is_cuda else HOST
        shape, strides = tuple(array.shape), tuple(array.stride())
        return ArrayInfo(name, array.data_ptr(), shape, strides, dtype_name(str(array.dtype)), device)

    def layout(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Shape, strides and torch's element type."""
        return shape, contiguous_strides(shape), _DTYPES[dtype]

    def allocate(self, like: Any, layouts: Sequence[Any], stream: int) -> tuple[list[Any], list[int]]:
        """From torch's caching allocator, so that streams and graphs are torch's concern."""
        if like.get_device() == self._current_device():
            made = [_empty_on_gpu(*layout) for layout in layouts]
        else:
            made = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in layouts]
        return made, [x.data_ptr() for x in made]

    def stream(self, device: int, requested: Any) -> int:
        """torch's current stream of the device."""
        if requested is not None:
            raise ArgumentError("stream= is not for torch tensors; wrap the call in 'with torch.cuda.stream(stream):'")
        return 0 if device == HOST else self._current_stream(device)
