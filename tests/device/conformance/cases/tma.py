"""TMA: boxes of tensors between global and shared memory, runs of bytes, and additions."""

from __future__ import annotations

import numpy as np

from conformance.case import Array, Case
from conformance.inputs import integers, nonzero_bytes, unwritten
from conformance.maps import ELEMENTS, MapOf

_SWIZZLES = (0, 32, 64, 128)
#: Along every dimension but the innermost: of the tensor, of the box.
_DIMS = (0, 5, 3, 4, 2)
_BOX = (0, 8, 2, 2, 2)
_BARRIER_BYTES = 1024


def _map(element: str, rank: int, swizzle: int, steps: tuple[int, ...] | None = None, fill: str = "zero") -> MapOf:
    item = np.dtype(ELEMENTS[element]).itemsize
    inner = (swizzle or 48) // item
    dims = (inner + 24 // item, *_DIMS[1:rank])
    strides, pitch = [], -(-dims[0] * item // 16) * 16
    for size in dims[1:]:
        # Something that belongs to no element lies between any two.
        strides.append(pitch + 16)
        pitch = strides[-1] * size
    box = (inner, *_BOX[1:rank])
    return MapOf("tensor", element, dims, tuple(strides), box, steps or (1,) * rank, swizzle, fill)


def _corners(m: MapOf) -> Array:
    """A box inside; along each dimension boxes partly and wholly outside, on both sides; the farthest corner.

    Along the innermost dimension boxes begin at multiples of 16 bytes: anywhere else is an illegal instruction.
    """
    rank = len(m.dims)
    units = (16 // np.dtype(ELEMENTS[m.element]).itemsize, *(1,) * (rank - 1))
    last = tuple((size - 1) // unit * unit for size, unit in zip(m.dims, units, strict=True))
    places = [(0,) * rank]
    for dimension, (size, box, unit) in enumerate(zip(m.dims, m.box, units, strict=True)):
        for start in (-unit, unit - box, -box, unit, last[dimension], -(-size // unit) * unit):
            places.append(tuple(start if d == dimension else 0 for d in range(rank)))
    places.append(last)
    coordinates = np.zeros((len(places), 5), np.int32)
    coordinates[:, :rank] = places
    return coordinates


def _tensor(m: MapOf) -> Array:
    """Different bytes everywhere, as far as they reach."""
    return np.arange(1, m.strides[-1] * m.dims[-1] // 2 + 1, dtype=np.uint16)


def _name(m: MapOf) -> str:
    steps = "-steps-" + "x".join(map(str, m.element_strides)) if max(m.element_strides) > 1 else ""
    return f"{m.element}-rank{len(m.dims)}-swizzle{m.swizzle}{steps}{'-nan' if m.fill == 'nan' else ''}"


def _round_up(count: int) -> int:
    return -(-count // 1024) * 1024


def _load(m: MapOf) -> Case:
    places = _corners(m)
    return Case(
        "tma_load",
        _name(m),
        f"{{{len(m.dims)}}}",
        inputs={"map": m, "tensor": _tensor(m), "boxes": len(places), "box_bytes": m.box_bytes, "places": places},
        outputs={"out": unwritten((len(places), m.box_bytes // 2), np.uint16)},
        threads=64,
        smem_bytes=_BARRIER_BYTES + _round_up(m.box_bytes),
    )


def _store(m: MapOf, kind: str) -> Case:
    # A store that begins before the tensor is an illegal instruction; one that ends behind it is clipped.
    corners, element = _corners(m), ELEMENTS[m.element]
    places = corners[(corners >= 0).all(axis=1)]
    item = np.dtype(element).itemsize
    # Sums stay exact: a place is added to once per box at most.
    values = integers((len(places), m.box_bytes // item), 1, 4, seed=60)
    before = integers(m.strides[-1] * m.dims[-1] // item, 10, 13, seed=61)
    return Case(
        "tma_store",
        f"{kind[1:].lower()}-{_name(m)}",
        f"{{{len(m.dims)}, Kind::{kind}}}",
        inputs={
            "map": m,
            "boxes": len(places),
            "box_bytes": m.box_bytes,
            "places": places,
            "x": values.astype(element).view(np.uint8),
        },
        outputs={"tensor": before.astype(element).view(np.uint8)},
        threads=64,
        smem_bytes=_round_up(m.box_bytes),
    )


def _multicast(m: MapOf, masks: tuple[int, ...], label: str) -> Case:
    size = len(masks)
    return Case(
        "tma_multicast",
        f"{_name(m)}-{label}-of-{size}",
        f"{{{len(m.dims)}}}",
        inputs={
            "map": m,
            "tensor": _tensor(m),
            "box_bytes": m.box_bytes,
            "places": _corners(m)[:size],
            "masks": np.array(masks, np.int32),
            "counts": np.array([sum(mask >> rank & 1 for mask in masks) for rank in range(size)], np.int32),
        },
        outputs={"out": unwritten((2 * size, size, m.box_bytes // 2), np.uint16)},
        grid=(2 * size, 1, 1),
        threads=64,
        smem_bytes=_BARRIER_BYTES + _round_up(size * m.box_bytes),
        cluster=size,
    )


def _bulk(label: str, variant: str, total: int = 2048) -> Case:
    sizes = (16, 32, 48, 256, 16, 1024, 128)
    here = np.cumsum((0, *(size + 16 for size in sizes)))[:-1]
    there = np.cumsum((32, *(size + 32 for size in sizes[::-1])))[:-1][::-1]
    table = np.stack([here, there, np.array(sizes)], 1).astype(np.int32)
    x = nonzero_bytes(total, seed=62)
    before: Array = unwritten(total, np.uint8)
    if variant == "kAdd":
        x = integers(total // 4, -500, 500, seed=63).astype(np.float32).view(np.uint8)
        before = integers(total // 4, -500, 500, seed=64).astype(np.float32).view(np.uint8)
        table[-1, 1] = table[0, 1]  # two pieces go to the same place
    return Case(
        "bulk",
        label,
        f"Variant::{variant}",
        inputs={"pieces": len(table), "total_bytes": total, "table": table, "x": x},
        outputs={"out": before},
        threads=64,
        smem_bytes=_BARRIER_BYTES + total,
    )


_EVERY = [_map("bf16", rank, swizzle) for rank in (2, 3, 4, 5) for swizzle in _SWIZZLES]
_TYPES = [_map(element, 3, swizzle) for element in ("fp16", "fp32") for swizzle in (0, 128)]
_BITS = [_map(element, 2, 64) for element in ("u8", "u16", "u32")]
_STEPPED = [_map("bf16", 3, 64, (1, 2, 1)), _map("bf16", 4, 0, (1, 3, 2, 1)), _map("bf16", 2, 128, (1, 5))]
_NAN = [_map(element, 2, 32, fill="nan") for element in ("fp16", "bf16", "fp32")]
_CLUSTERED = [_map("bf16", rank, swizzle) for rank, swizzle in ((2, 128), (3, 64), (4, 32), (5, 0))]

CASES = (
    *(_load(m) for m in (*_EVERY, *_TYPES, *_BITS, *_STEPPED, *_NAN)),
    *(_store(m, "kStore") for m in (*_EVERY, *_TYPES, *_BITS, *_STEPPED)),
    *(_store(m, "kAdd") for m in (*_EVERY, *_TYPES, *_BITS[2:])),
    *(_multicast(m, (0b11, 0b11), "to-all") for m in _CLUSTERED),
    _multicast(_CLUSTERED[0], (0b0110, 0b1001, 0b0001, 0b1111), "to-some"),
    _bulk("load", "kLoad"),
    _bulk("store", "kStore"),
    _bulk("store-groups", "kStoreGroups"),
    _bulk("add", "kAdd"),
)
