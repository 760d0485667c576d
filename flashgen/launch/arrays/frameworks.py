"""Which array library an argument belongs to, decided by its type, without importing any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.errors import ArgumentError, FlashgenError
from flashgen.launch.arrays.array import Framework

#: What reading something else than an array of a library ends in.
UNREADABLE = (AttributeError, TypeError, RuntimeError, BufferError)

_by_type: dict[type, Framework] = {}


def framework_of(array: Any) -> Framework:
    """The adapter for an array's library; ArgumentError for what is no array."""
    kind = type(array)
    found = _by_type.get(kind)
    if found is None:
        found = _by_type[kind] = _find(kind, array)
    return found


def common_framework(names: Sequence[str], arrays: Sequence[Any]) -> Framework:
    """The adapter all arguments share; ArgumentError when they come from different libraries."""
    found = [_named(name, array) for name, array in zip(names, arrays, strict=True)]
    for name, framework in zip(names, found, strict=True):
        if framework is not found[0]:
            raise ArgumentError(
                f"{name} is {_kind(framework)} and {names[0]} is {_kind(found[0])}; "
                "pass all arguments from one array library"
            )
    return found[0]


def unreadable(names: Sequence[str], arrays: Sequence[Any], framework: Framework, error: Exception) -> ArgumentError:
    """Most likely a mixture of array libraries, or no array at all: says which."""
    if isinstance(error, FlashgenError):
        raise error
    common_framework(names, arrays)
    for name, array in zip(names, arrays, strict=True):
        try:
            framework.signature((array, array, array), None)
        except UNREADABLE as its:
            return ArgumentError(
                f"{name} cannot be read as {_kind(framework)} ({its}); pass a dense one that holds its own elements"
            )
    return ArgumentError(f"the arguments cannot be read as {framework.name} arrays: {error}")


def _named(name: str, array: Any) -> Framework:
    try:
        return framework_of(array)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from None


def _kind(framework: Framework) -> str:
    return f"a {framework.name} array"


def _find(kind: type, array: Any) -> Framework:
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in libraries:
        from flashgen.launch.arrays.torch_arrays import TorchArrays

        TorchArrays.check_type(kind)
        return _shared(TorchArrays)
    if "cupy" in libraries:
        from flashgen.launch.arrays.cupy_arrays import CupyArrays

        return _shared(CupyArrays)
    if "numpy" in libraries:
        from flashgen.launch.arrays.numpy_arrays import NumpyArrays

        return _shared(NumpyArrays)
    if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__"):
        from flashgen.launch.arrays.foreign_arrays import ForeignArrays

        return _shared(ForeignArrays)
    raise ArgumentError(
        f"{kind.__module__}.{kind.__qualname__} is not an array; "
        "pass torch tensors, CuPy arrays, or objects with __dlpack__ or __cuda_array_interface__ "
        "(NumPy arrays with target='emulator')"
    )


_instances: dict[type, Framework] = {}


def _shared(framework: type) -> Framework:
    return _instances.setdefault(framework, framework())
