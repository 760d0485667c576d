"""Arrays of any other library, through DLPack or the CUDA array interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.arrays import dlpack
from flashgen.launch.arrays.array import ArrayInfo, contiguous_strides, elements, low_bits
from flashgen.launch.arrays.device_array import DeviceArray
from flashgen.launch.driver.cuda import current_device, get_driver

_TYPESTR = {"f2": "fp16", "f4": "fp32", "i4": "int32", "i8": "int64", "u8": "uint64"}
#: The legacy default stream by its explicit handle, which DLPack and the CUDA array interface use too.
LEGACY_STREAM = 1
#: What stands for the name of an array in complaints until the name is known.
_NAMELESS = "array"


class ForeignArrays:
    """Adapter for objects with ``__dlpack__`` (preferred: it knows bf16) or ``__cuda_array_interface__``."""

    name = "foreign (DLPack or CUDA-array)"

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """Everything but the addresses, and the addresses; makes the stream wait for the producers.

        A complaint about an array is part of it, too: whoever describes the arrays knows their names.
        """
        stream = self.stream(0, requested)
        traits: list[Any] = []
        pointers: list[int] = []
        for array in arrays:
            try:
                info = self._read(array, stream)
            except ArgumentError as error:
                pointers.append(0)
                traits.append((type(array), str(error)))
            else:
                pointers.append(info.pointer)
                plain = info.shape, info.strides, info.dtype, info.device, info.writable
                traits.append((type(array), low_bits(info.pointer), *plain))
        return tuple(traits), tuple(pointers)

    def describe(self, names: Sequence[str], signature: Any) -> list[ArrayInfo]:
        """The arrays of a signature."""
        infos = []
        for name, (_, *traits) in zip(names, signature, strict=True):
            if len(traits) == 1:
                raise ArgumentError(f"{name}{traits[0].removeprefix(_NAMELESS)}")
            infos.append(ArrayInfo(name, *traits))
        return infos

    def _read(self, array: Any, stream: int | None) -> ArrayInfo:
        if hasattr(array, "__dlpack__"):
            kind, _ = array.__dlpack_device__()
            # -1 asks the producer not to synchronise: the launch has ordered the streams already, or will.
            wanted = None if kind == dlpack.CPU else -1 if stream is None else stream
            return dlpack.read(_NAMELESS, dlpack.capsule(array, wanted))
        return _from_interface(_NAMELESS, array.__cuda_array_interface__, stream)

    def layout(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Shape and element type."""
        return shape, dtype

    def allocate(self, like: Any, layouts: Sequence[Any], stream: int) -> tuple[list[Any], list[int]]:
        """Stream-ordered memory of the driver; refused during graph capture, which would keep its address."""
        driver = get_driver()
        device = self._read(like, None).device
        with driver.on(device):
            capturing = driver.is_capturing(stream)
        if capturing:
            raise LaunchError(
                "outputs for arrays of this library cannot be allocated while a CUDA graph is captured; "
                "use torch or CuPy arrays there"
            )
        made = [DeviceArray(driver, shape, dtype, device, stream) for shape, dtype in layouts]
        return made, [array.info.pointer for array in made]

    def stream(self, device: int, requested: Any) -> int:
        """The caller's ``stream=`` (a handle, or an object with one), else the legacy default stream."""
        if requested is None:
            return LEGACY_STREAM
        for attribute in ("cuda_stream", "ptr", "handle"):
            requested = getattr(requested, attribute, requested)
        try:
            return int(requested) or LEGACY_STREAM
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"stream={requested!r} is not a stream; pass its handle as an int") from error


def _from_interface(name: str, interface: dict[str, Any], stream: int | None) -> ArrayInfo:
    typestr = interface["typestr"]
    dtype = _TYPESTR.get(typestr[1:], typestr) if typestr[0] in "<|=" else typestr
    shape = tuple(interface["shape"])
    byte_strides = interface.get("strides")
    if byte_strides is None:
        strides = contiguous_strides(shape)
    else:
        strides = elements(name, tuple(byte_strides), int(typestr[2:]))
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name} has a validity mask, which flashgen does not read; pass a plain array")
    pointer, is_read_only = interface["data"]
    driver = get_driver()
    device = _device_of(name, pointer or 0)
    producer = interface.get("stream")
    if producer is not None and stream is not None and producer != stream:
        with driver.on(device):
            driver.wait(stream, producer)
    return ArrayInfo(name, pointer or 0, shape, strides, dtype, device, not is_read_only)


def _device_of(name: str, pointer: int) -> int:
    if not pointer:
        return current_device()
    try:
        return get_driver().device_of(pointer)
    except LaunchError as error:
        raise ArgumentError(
            f"{name} is at address {pointer:#x}, which CUDA does not know ({error}); pass memory of a GPU"
        ) from error
