"""The bytes of a kernel's parameter struct."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.maps import MapOf
from conformance.source import fields

#: Size (and alignment) of the field types that kernels use.
_SCALARS = {"i32": "i", "u32": "I", "float": "f"}


def pack(case: Case, variant_index: int, addresses: Mapping[str, int], encode: Callable[[Any], bytes]) -> bytes:
    """``addresses`` are those of the arrays; ``encode`` makes a tensor map of what the case says of it.

    Pointers to arrays that the case does not have are null.
    """
    mapped = {value.array for value in case.inputs.values() if isinstance(value, MapOf)}
    unknown = {*case.inputs, *case.outputs} - {field.name for field in fields(case.kernel)} - mapped
    if unknown:
        raise ValueError(f"{case.name}: kernels/{case.kernel}.cu has no parameter {', '.join(sorted(unknown))}")
    data, alignment = bytearray(), 1
    for field in fields(case.kernel):
        if field.name == "variant":
            item, step = struct.pack("i", variant_index), 4
        elif field.type.endswith("*"):
            item, step = struct.pack("Q", addresses.get(field.name, 0)), 8
        elif field.type in _SCALARS:
            item, step = struct.pack(_SCALARS[field.type], case.inputs[field.name]), 4
        else:
            item, step = encode(case.inputs[field.name]), 64
        data += bytes(-len(data) % step) + item
        alignment = max(alignment, step)
    return bytes(data + bytes(-len(data) % alignment))


def arrays_of(case: Case) -> dict[str, Any]:
    """Everything that a pointer of the parameter struct may point to."""
    inputs = {name: value for name, value in case.inputs.items() if isinstance(value, np.ndarray)}
    return {**inputs, **case.outputs}
