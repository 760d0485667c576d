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
#: Which words of the parameters a launch writes, each with where among what it hands over the new value is.
Places = tuple[tuple[int, int], ...]


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
        self._addresses = tuple((at // _WORD, name) for at, name in _addresses(table, boxes, map_address))

    def template(self, values: Mapping[str | None, Value]) -> Template:
        """The parameters without addresses; these are None, and those in tensor maps are overwritten later."""
        return self._fields.pack(*[values[name] for name in self._names]) + self._padding

    def places(self, names: Sequence[str]) -> Places:
        """Where what calls hand over, in the order of ``names``, belongs; what they lack keeps the template's 0."""
        order = {**{name: i for i, name in enumerate(names)}, COUNTER: _COUNTER_PLACE}
        return tuple((at, order[name]) for at, name in self._addresses if name in order)

    def write(self, memory: Memory, template: Template, places: Places, pointers: Sequence[int]) -> None:
        """Writes the complete parameters into the first ``size`` bytes of the memory."""
        memory.bytes[: self.size] = template
        words = memory.words
        for at, place in places:
            words[at] = pointers[place]


def _addresses(table: ParamTable, boxes: Sequence[Box], map_address: int) -> list[tuple[int, str]]:
    """The offsets and names of the addresses and per-call numbers in the struct, in order."""
    offsets = field_offsets(table)
    found = [(offsets[box.parameter] + map_address, box.tensor) for box in boxes]
    found += [(offsets[param.name], param.name) for param in table.params if param.kind in _OF_CALLS]
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
