"""What kernel plans are made of: parameters, shared memory, TMA boxes, constants, and a call's sizes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: C type -> struct format character. Parameters are ordered widest first, so the struct has no holes.
_FORMATS = {"map": "128s", "void*": "Q", "uint64": "Q", "int64": "q", "int32": "i", "float": "f"}
#: Alignment of a tensor map.
_MAP_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Param:
    """One field of a kernel's parameter struct."""

    name: str
    #: Key of ``_FORMATS``.
    kind: str
    #: How the field is declared in C++, e.g. ``const element_t*``.
    declared: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class ParamTable:
    """The parameter struct: read by the template (declaration) and by the launcher (packing)."""

    params: tuple[Param, ...]

    @classmethod
    def widest_first(cls, params: Iterable[Param]) -> ParamTable:
        """These parameters, stably sorted from the widest to the narrowest, so the struct has no holes."""
        order = tuple(_FORMATS)
        return cls(tuple(sorted(params, key=lambda p: order.index(p.kind))))

    @property
    def names(self) -> tuple[str, ...]:
        """Field names in struct order."""
        return tuple(p.name for p in self.params)

    @property
    def format(self) -> str:
        """The ``struct`` format; native alignment, which the field order makes equal to C++'s."""
        return "@" + "".join(_FORMATS[p.kind] for p in self.params)

    @property
    def bytes(self) -> int:
        """sizeof the struct, tail padding included."""
        alignment = _MAP_ALIGNMENT if any(p.kind == "map" for p in self.params) else 8
        return -(-struct.calcsize(self.format) // alignment) * alignment


@dataclass(frozen=True, slots=True)
class SmemRegion:
    """A named region of dynamic shared memory."""

    name: str
    offset: int
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class SmemMap:
    """The shared-memory map: read by the template (offsets) and by the launcher (size)."""

    regions: tuple[SmemRegion, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all regions."""
        return tuple(region.name for region in self.regions)

    @property
    def bytes(self) -> int:
        """Dynamic shared memory to ask for at launch."""
        return max((r.offset + r.bytes for r in self.regions), default=0)

    @property
    def sizes(self) -> str:
        """Regions above 256 bytes, as text, and which region each one reuses."""
        parts = []
        for i, region in enumerate(self.regions):
            before = (r.name for r in self.regions[:i] if r.offset <= region.offset < r.offset + r.bytes)
            shared = f" (over {name})" if (name := next(before, "")) else ""
            parts += [f"{region.name} {region.bytes}{shared}"] if region.bytes > 256 else []
        return ", ".join(parts)

    def __getitem__(self, name: str) -> SmemRegion:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Box:
    """The TMA box of a tensor (batch, row, head, column). A 1-D workspace counts as rows of one box each."""

    #: The tensor; the parameter is ``<tensor>_map``.
    tensor: str
    rows: int
    columns: int
    #: Swizzle in bytes; 0: none.
    swizzle: int = 128
    #: Element type, if not the spec's dtype.
    element: str | None = None
    #: A box may not cross the boundary of a page, which the tensor's rows are.
    within_pages: bool = False
    #: Of packed rows whose boxes end with their sequence, the side: the map's rows are a window, as long as the longest
    #: sequence, which a fourth dimension moves from row to row.
    window: Literal["q", "kv"] | None = None
    #: L2 reads so many bytes at once, because other blocks soon need what lies beside the box; 0: what the box needs.
    l2_promotion: Literal[0, 256] = 256

    def rows_within(self, page_size: int) -> int:
        """The rows of a box where pages have so many; page_box_rows in key_boxes.cuh computes the same."""
        return min(page_size & -page_size, self.rows & -self.rows) if self.within_pages else self.rows

    @property
    def parameter(self) -> str:
        """The kernel parameter that holds the map."""
        return f"{self.tensor}_map"


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one call."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    #: Splits of the keys of a sequence.
    splits: int = 1
    #: Rows of all sequences, of queries and of keys, where these are packed and len_q and len_kv are of the longest.
    packed_rows: tuple[int, int] | None = None

    def query_tiles(self, rows: int) -> int:
        """Tiles of so many queries of a head of all sequences; of packed ones the most that there can be."""
        return self._tiles(0, self.len_q, rows)

    def key_tiles(self, rows: int) -> int:
        """The same of keys; first_tile_of in sequence.cuh numbers them."""
        return self._tiles(1, self.len_kv, rows)

    def _tiles(self, side: int, longest: int, rows: int) -> int:
        if self.packed_rows is None:
            return self.batch * -(-longest // rows)
        return self.packed_rows[side] // rows + self.batch if longest else 0

    @property
    def score_pitch(self) -> int:
        """Elements from one row of S, P or dS to the next."""
        return score_pitch(self.len_kv)


def score_pitch(len_kv: int) -> int:
    """The length of a row of S, P or dS in memory: rounded up to whole 16-byte chunks of any dtype."""
    return -(-len_kv // 8) * 8


@dataclass(frozen=True, slots=True)
class Workspace:
    """An array in device memory between kernels of one pass; its parameter has the same name."""

    name: str
    #: Key of the dtype table; None: the spec's dtype.
    dtype: str | None
    #: Fields of ``Problem``, ``head_dim_v``, ``padded_dim_v`` (a multiple of 16), or ``q_tiles`` and ``kv_tiles``, the
    #: tiles of the kernel that writes it.
    extents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """One member of the kernel's ``constexpr`` config struct."""

    name: str
    value: int | bool
    note: str = ""
