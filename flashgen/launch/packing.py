"""Kernel parameters: one struct by value, packed from the plan's table.

All but the addresses of a call is settled by its shapes, so it is packed once into a template;
a launch copies the template into this thread's scratch memory and writes the addresses over it.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from flashgen.errors import LaunchError
from flashgen.plan.model import Box, ParamTable, Problem

#: The order in which calls hand over addresses, after numbers and side and captured tensors, and before those of their
#: gradients; a forward call stops after ``lse``. Last of all comes the counter of a persistent kernel.
POINTERS = (
    *("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv"),
    *("dsum", "dq_accum", "row_stats", "head_counts", "turns"),
)
COUNTER = "counter"
#: Kinds of parameters that come with a call.
_OF_CALLS = ("void*", "uint64")
#: The driver's limit on a kernel's parameters.
MAX_PARAMS_BYTES = 4096
_LOG2_E = math.log2(math.e)

#: Where a kernel's counter is among the addresses, if it has one.
_COUNTER_PLACE = -1

#: Of a parameter: a number, or the bytes of a tensor map.
Value = float | bytes
#: The parameters of a call but for the addresses: the stretches between these.
Template = tuple[bytes, ...]


class Scratch(threading.local):
    """Parameter memory of the calling thread, and the array of one pointer that the driver wants."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(MAX_PARAMS_BYTES)
        self.memory = memoryview(self.buffer).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.kernel_params = ctypes.addressof(self._pointers)


class Packer:
    """Writes the parameter struct of one kernel; tensors' addresses lie ``map_address`` bytes into their maps."""

    __slots__ = ("_fields", "_layout", "_names", "_padding", "_pick", "_stretches", "size", "takes_counter")

    def __init__(
        self,
        table: ParamTable,
        first: tuple[str, ...] = (),
        gradients: tuple[str, ...] = (),
        *,
        boxes: Sequence[Box] = (),
        map_address: int = 0,
    ) -> None:
        self.size = table.bytes
        self.takes_counter = COUNTER in table.names
        if self.size > MAX_PARAMS_BYTES:
            raise LaunchError(f"the parameter struct takes {self.size} bytes; CUDA allows {MAX_PARAMS_BYTES}")
        self._fields = struct.Struct(table.format)
        self._padding = bytes(self.size - self._fields.size)
        self._names = tuple(None if p.kind in _OF_CALLS else p.name for p in table.params)
        places = _addresses(table, (*first, *POINTERS, *gradients), boxes, map_address)
        self._stretches = tuple(_between([at for at, _ in places], self.size))
        # One call writes all: stretches of the template and addresses, in turns.
        self._layout = struct.Struct("=" + "".join(f"{end - start}sQ" for start, end in self._stretches)[:-1])
        order = []
        for i, (_, place) in enumerate((*places, (0, 0))):
            # The counter is counted from the end, which the template does not move.
            order += [i, place if place < 0 else len(self._stretches) + place]
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]] = itemgetter(*order[:-1]) if places else tuple

    def template(self, values: Mapping[str | None, Value]) -> Template:
        """The parameters between the addresses; these have the value of None, and those in maps are written over."""
        whole = self._fields.pack(*[values[name] for name in self._names]) + self._padding
        return tuple(whole[start:end] for start, end in self._stretches)

    def write(self, memory: memoryview, template: Template, pointers: Sequence[int]) -> None:
        """The complete parameters, into the first ``size`` bytes of ``memory``."""
        self._layout.pack_into(memory, 0, *self._pick((*template, *pointers)))


def _addresses(
    table: ParamTable, order: tuple[str, ...], boxes: Sequence[Box], map_address: int
) -> list[tuple[int, int]]:
    """Where in the struct lie addresses, and numbers that calls bring, in order, and which of a call's they are."""
    offsets = field_offsets(table)
    found = [(offsets[box.parameter] + map_address, order.index(box.tensor)) for box in boxes]
    for param in table.params:
        if param.kind in _OF_CALLS:
            place = _COUNTER_PLACE if param.name == COUNTER else order.index(param.name)
            found.append((offsets[param.name], place))
    return sorted(found)


def _between(addresses: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """The stretches of a struct before, between and behind its addresses, empty ones too."""
    start = 0
    for address in addresses:
        yield start, address
        start = address + struct.calcsize("=Q")
    yield start, size


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
