"""The DLPack structures through ctypes: read another library's capsule, make one of our own."""

from __future__ import annotations

import ctypes
from typing import Any

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import HOST, ArrayInfo, contiguous_strides

CPU, CUDA, CUDA_MANAGED = 1, 2, 13
_TYPES = {
    **{(2, 16): "fp16", (4, 16): "bf16", (2, 32): "fp32", (10, 8): "e4m3", (12, 8): "e5m2"},
    **{(0, 32): "int32", (0, 64): "int64", (1, 64): "uint64"},
}
_CODES = {name: code for code, name in _TYPES.items()}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


class _Versioned(ctypes.Structure):
    """As of DLPack 1.0, which says whether others may write."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_is_valid_address = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_address_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
#: The version that producers are asked for, and the flag of arrays that are read-only.
_VERSION, _READ_ONLY = (1, 0), 1
#: Types whose ``__dlpack__`` is older than versions.
_unversioned: set[type] = set()


def capsule(array: Any, stream: int | None) -> Any:
    """The capsule of an array, with a version where its library has them; read-only arrays may have no other."""
    kind = type(array)
    if kind not in _unversioned:
        try:
            return array.__dlpack__(stream=stream, max_version=_VERSION)
        except TypeError:
            _unversioned.add(kind)
    return array.__dlpack__(stream=stream)


def read(name: str, capsule: Any) -> ArrayInfo:
    """What an unconsumed capsule describes; the capsule stays the producer's to free."""
    writable = True
    try:
        if _is_valid(capsule, _VERSIONED_NAME):
            versioned = _Versioned.from_address(_get_pointer(capsule, _VERSIONED_NAME))
            if versioned.major != _VERSION[0]:
                version = f"{versioned.major}.{versioned.minor}"
                raise ArgumentError(f"{name} speaks DLPack {version}; pass an array whose library speaks DLPack 1")
            tensor, writable = versioned.tensor, not versioned.flags & _READ_ONLY
        else:
            tensor = _Managed.from_address(_get_pointer(capsule, _NAME)).tensor
    except (ValueError, TypeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{name} gave a DLPack capsule that cannot be read ({error})") from error
    kind, index = tensor.device.kind, tensor.device.index
    if kind not in (CPU, CUDA, CUDA_MANAGED):
        raise ArgumentError(f"{name} is on DLPack device type {kind}; pass an array on an NVIDIA GPU")
    dtype = _TYPES.get((tensor.dtype.code, tensor.dtype.bits)) if tensor.dtype.lanes == 1 else None
    dtype = dtype or f"DLPack type (code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes)"
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    pointer = (tensor.data or 0) + tensor.byte_offset
    return ArrayInfo(name, pointer, shape, strides, dtype, HOST if kind == CPU else index, writable)


class _Export:
    """Memory behind one exported capsule: the C structures, and the array that owns the data."""

    def __init__(self, info: ArrayInfo, device: tuple[int, int], owner: Any) -> None:
        rank = len(info.shape)
        self.owner = owner
        self.shape = (ctypes.c_int64 * rank)(*info.shape)
        self.strides = (ctypes.c_int64 * rank)(*info.strides)
        code, bits = _CODES[info.dtype]
        self.managed = _Managed()
        self.managed.tensor = _Tensor(
            info.pointer, _Device(*device), rank, _DataType(code, bits, 1), self.shape, self.strides, 0
        )
        self.managed.deleter = _delete_export


#: Exports in use, by the address of their structure; the consumer's deleter or the capsule's end drops them.
_exports: dict[int, _Export] = {}


def _delete(managed: Any) -> None:
    _exports.pop(ctypes.addressof(managed.contents), None)


_delete_export = _Deleter(_delete)


def _drop(capsule: int) -> None:
    # A consumer renames the capsule; only one that nobody took still has the first name.
    if _is_valid_address(capsule, _NAME):
        _exports.pop(_address_pointer(capsule, _NAME), None)


_drop_unconsumed = _CapsuleDestructor(_drop)


def export(info: ArrayInfo, device: tuple[int, int], owner: Any) -> Any:
    """A ``dltensor`` capsule over an array's memory, which keeps ``owner`` alive while someone uses it."""
    entry = _Export(info, device, owner)
    address = ctypes.addressof(entry.managed)
    _exports[address] = entry
    return _new_capsule(address, _NAME, ctypes.cast(_drop_unconsumed, ctypes.c_void_p))
