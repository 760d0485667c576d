"""The tensor maps of a call: one for each tensor that TMA copies, encoded by the driver.

Encoding a map takes the driver longer than a whole launch may take, so it is done when a call is prepared; a
launch only writes the tensor's address into it. For GPUs nothing documents where it goes, so ``address_can_be_written``
finds out whether it is where it was always seen.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from flashgen.errors import LaunchError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.packing import Value, before
from flashgen.launch.call.prepared import PARAMETER_NAMES
from flashgen.launch.driver.tensor_map import ELEMENTS, TensorMap, tensor_problem
from flashgen.launch.target import Target
from flashgen.plan.model.plans import Box, KernelPlan, Problem

#: Addresses with no bit in common, between them all that a pointer of a process may have; the first stands for
#: those that calls bring.
_SOME_ADDRESS = 0x5A5A_A5A5_5A50
_OTHER_ADDRESS = 0x25A5_5A5A_A5A0
_SAMPLES = (
    TensorMap(0, "bf16", (128, 4096, 32, 2), (8192, 256, 2**25), (64, 128, 1, 1), swizzle=128),
    TensorMap(0, "fp16", (64, 1, 1, 1), (0, 0, 0), (64, 64, 1, 1), swizzle=128),
    TensorMap(0, "bf16", (32, 2**31 - 1, 1, 65536), (64, 0, 2**40 - 16), (32, 256, 1, 1), swizzle=64),
    TensorMap(0, "fp32", (8, 77, 3), (96, 32), (8, 16, 1), swizzle=32, fill="nan"),
    TensorMap(0, "u8", (2**32, 5), (2**39,), (256, 2), element_strides=(1, 2)),
)


def encoded_maps(
    plan: KernelPlan, problem: Problem, arrays: Sequence[ArrayInfo], target: Target, device: int
) -> dict[str | None, Value] | None:
    """The kernel's tensor maps by parameter; None where no tensor map can describe these tensors."""
    grid = plan.grid(problem)
    if not plan.boxes or not all(grid):
        return {}
    by_name = {PARAMETER_NAMES.get(array.name, array.name): array for array in arrays}
    layouts = [layout(by_name[box.tensor], box, plan.spec.dtype, problem) for box in plan.boxes]
    if any(tensor_problem(by_name[b.tensor].pointer, *x) for b, x in zip(plan.boxes, layouts, strict=True)):
        return None
    maps = [tensor_map(box, plan.spec.dtype, _SOME_ADDRESS, *x) for box, x in zip(plan.boxes, layouts, strict=True)]
    encoded = target.encode(maps, device)
    if encoded is None:
        return None
    made: dict[str | None, Value] = {box.parameter: data for box, data in zip(plan.boxes, encoded, strict=True)}
    for box, (_, strides) in zip(plan.boxes, layouts, strict=True):
        if box.window is not None:
            made[before(box.parameter)] = bytes_before(box, problem, strides)
    return made


def bytes_before(box: Box, problem: Problem, strides: tuple[int, ...]) -> int:
    """How far before its tensor a map begins. A sequence lies at the end of its window, so the first window does."""
    return 0 if box.window is None else window_of(box.window, problem) * strides[0]


def window_of(side: Literal["q", "kv"], problem: Problem) -> int:
    """The rows of a window: as many as the longest sequence has."""
    return problem.len_q if side == "q" else problem.len_kv


def layout(array: ArrayInfo, box: Box, dtype: str, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents (column, row, head, batch), and the byte strides of all but the first.

    Packed rows with a window have its rows instead, and its places instead of a batch.
    """
    item_bytes = ELEMENTS[box.element or dtype].bytes
    if len(array.shape) == 1:
        return (box.columns, array.shape[0] // box.columns, 1, 1), (box.columns * item_bytes,) * 3
    batch, rows, heads, columns = array.shape
    per_batch, per_row, per_head, _ = array.strides
    strides = (per_row * item_bytes, per_head * item_bytes, per_batch * item_bytes)
    if box.window is not None:
        return (columns, window_of(box.window, problem), heads, rows + 1), (*strides[:2], strides[0])
    return (columns, rows, heads, batch), strides


def tensor_map(box: Box, dtype: str, address: int, dims: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """The tensor map for this layout."""
    columns = (box.columns, box.rows_within(dims[1]), 1, 1)
    element, promotion = box.element or dtype, box.l2_promotion
    return TensorMap(address, element, dims, strides, columns, swizzle=box.swizzle, l2_promotion=promotion)


def address_can_be_written(encode: Callable[[TensorMap], bytes], offset: int) -> bool:
    """Whether encoded maps hold the address at ``offset`` and do not depend on it elsewhere."""
    verdicts = [_is_written(encode, offset, sample) for sample in _SAMPLES]
    return any(verdicts) and False not in verdicts


def _is_written(encode: Callable[[TensorMap], bytes], offset: int, sample: TensorMap) -> bool | None:
    """The map of one tensor; None if TMA cannot take it."""
    try:
        first, other = (encode(replace(sample, address=address)) for address in (_SOME_ADDRESS, _OTHER_ADDRESS))
    except LaunchError:
        return None
    return holds_address(first, offset) and _with_address(first, offset, _OTHER_ADDRESS) == other


def holds_address(encoded: bytes, offset: int) -> bool:
    """Whether an encoded map has its address at ``offset``."""
    return _with_address(encoded, offset, _SOME_ADDRESS) == encoded


def _with_address(encoded: bytes, offset: int, address: int) -> bytes:
    word = struct.pack("=Q", address)
    return encoded[:offset] + word + encoded[offset + len(word) :]
