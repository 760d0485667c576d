"""Kernel parameters: one struct by value, packed from the plan's table.

All but the addresses of a call is settled by its shapes, so it is packed once into a template;
a launch copies the template into this thread's scratch memory and writes the addresses into it.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flashgen.errors import LaunchError
from flashgen.plan.model.plans import Box, ParamTable, Problem

COUNTER = "counter"
#: Kinds of parameters that come with a call.
_OF_CALLS = ("void*", "uint64")
#: The driver's limit on a kernel's parameters.
MAX_PARAMS_BYTES = 4096
_LOG2_E = math.log2(math.e)

#: Where a kernel's counter is among what a launch hands over, if it has one.
_COUNTER_PLACE = -1
#: Bytes of an address, which is what they are aligned to.
_WORD = struct.calcsize("=Q")

#: Of a parameter: a number, or the bytes of a tensor map.
Value = float | bytes
#: The parameters of a call, with 0 in place of the addresses.
Template = bytes


class Places(NamedTuple):
    """Which words of the parameters a launch writes, each with where among what it hands over the new value is."""

    plain: tuple[tuple[int, int], ...]
    #: Words that get an address so many bytes before the one that is handed over.
    earlier: tuple[tuple[int, int, int], ...] = ()

    def reordered(self, order: Sequence[int]) -> Places:
        """The same where what is handed over comes in another order; the counter stays behind it."""

        def place(old: int) -> int:
            return old if old < 0 else order[old]

        return Places(
            tuple((at, place(old)) for at, old in self.plain),
            tuple((at, place(old), shift) for at, old, shift in self.earlier),
        )


def before(parameter: str) -> str:
    """The value that says how many bytes before its tensor a tensor map begins."""
    return f"{parameter}_before"


class Memory:
    """Parameter memory, and the one-element pointer array for cuLaunchKernelEx."""

    __slots__ = ("_buffer", "_pointers", "bytes", "kernel_params", "words")

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(MAX_PARAMS_BYTES)
        self.bytes = memoryview(self._buffer).cast("B")
        #: The same memory; where an address belongs is a multiple of its size.
        self.words = self.bytes.cast("Q")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self.kernel_params = ctypes.addressof(self._pointers)


class Scratch(threading.local):
    """The calling thread's own memory."""

    def __init__(self) -> None:
        self.mine = Memory()


class Packer:
    """Writes the parameter struct of one kernel.

    In tensor maps the address of the tensor lies ``map_address`` bytes from the beginning.
    """

    __slots__ = ("_addresses", "_fields", "_names", "_padding", "size", "takes_counter")

    def __init__(self, table: ParamTable, *, boxes: Sequence[Box] = (), map_address: int = 0) -> None:
        self.size = table.bytes
        self.takes_counter = COUNTER in table.names
        if self.size > MAX_PARAMS_BYTES:
            raise LaunchError(f"the parameter struct takes {self.size} bytes; CUDA allows {MAX_PARAMS_BYTES}")
        self._fields = struct.Struct(table.format)
        self._padding = bytes(self.size - self._fields.size)
        self._names = tuple(None if p.kind in _OF_CALLS else p.name for p in table.params)
        fields = _addresses(table, boxes, map_address)
        self._addresses = tuple((at // _WORD, name, field) for at, name, field in fields)

    def template(self, values: Mapping[str | None, Value]) -> Template:
        """The parameters without addresses; these are None, and those in tensor maps are overwritten later."""
        return self._fields.pack(*[values[name] for name in self._names]) + self._padding

    def places(self, names: Sequence[str], values: Mapping[str | None, Value]) -> Places:
        """Where what calls hand over, in the order of ``names``, belongs; what they lack keeps the template's 0."""
        order = {**{name: i for i, name in enumerate(names)}, COUNTER: _COUNTER_PLACE}
        found = [
            (at, order[name], values.get(before(field), 0)) for at, name, field in self._addresses if name in order
        ]
        return Places(
            tuple((at, place) for at, place, shift in found if not shift),
            tuple((at, place, int(shift)) for at, place, shift in found if shift),
        )

    def write(self, memory: Memory, template: Template, places: Places, pointers: Sequence[int]) -> None:
        """Writes the complete parameters into the first ``size`` bytes of the memory."""
        memory.bytes[: self.size] = template
        words = memory.words
        for at, place in places.plain:
            words[at] = pointers[place]
        for at, place, shift in places.earlier:
            words[at] = pointers[place] - shift


def _addresses(table: ParamTable, boxes: Sequence[Box], map_address: int) -> list[tuple[int, str, str]]:
    """The offsets of the addresses and per-call numbers in the struct, in order, with their names and their fields."""
    offsets = field_offsets(table)
    found = [(offsets[box.parameter] + map_address, box.tensor, box.parameter) for box in boxes]
    found += [(offsets[param.name], param.name, param.name) for param in table.params if param.kind in _OF_CALLS]
    return sorted(found)


def field_offsets(table: ParamTable) -> dict[str, int]:
    """Byte offset of every field of the parameter struct."""
    ends = (struct.calcsize(ParamTable(table.params[: i + 1]).format) for i in range(len(table.params)))
    sizes = (struct.calcsize(ParamTable((param,)).format) for param in table.params)
    return {name: end - size for name, end, size in zip(table.names, ends, sizes, strict=True)}


def parameter_values(
    problem: Problem,
    band: tuple[int, int],
    scale: float,
    strides: Iterable[tuple[str, tuple[int, ...]]],
) -> dict[str | None, Value]:
    """Every value that is not an address, by the name the parameter tables use; None stands for addresses."""
    values: dict[str | None, Value] = {
        None: 0,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "len_q": problem.len_q,
        "len_kv": problem.len_kv,
        "group": problem.heads_q // max(problem.heads_kv, 1),
        "score_pitch": problem.score_pitch,
        "band_lower": band[0],
        "band_upper": band[1],
        "scale": scale,
        "scale_log2": scale * _LOG2_E,
    }
    for name, (batch, row, head, _) in strides:
        values[name + "_batch"] = batch
        values[name + "_row"] = row
        values[name + "_head"] = head
    return values
