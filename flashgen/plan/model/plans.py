"""The plan: every decision about a kernel, taken once, as frozen values that print well."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flashgen.arch import Arch
from flashgen.spec import AttentionSpec, Schedule

if TYPE_CHECKING:
    from flashgen.plan.captured.gradients import CapturedWork
    from flashgen.plan.expressions import Expressions
    from flashgen.plan.model.budget import Choice
    from flashgen.plan.model.sum_ring import SumRing

Pass = Literal["forward", "backward"]
#: forward; prepare: D = rowsum(dO * O); main: dK, dV and dQ; query: dQ without atomics; finish: dQ to dtype.
#: append: new keys and values into a cache; combine: O and L of several splits of the keys.
#: survey, before either pass: tables of the extremes of captured tensors.
#: clear_gaps, after either pass: zeros in packed rows outside every sequence.
#: captured_...: gradients of captured tensors; one captured_tile0, captured_tile1 ... for each bias.
Role = str

#: C type -> struct format character. Parameters are ordered widest first, so the struct has no holes.
_FORMATS = {"map": "128s", "void*": "Q", "uint64": "Q", "int64": "q", "int32": "i", "float": "f"}
#: Tensor maps lie at multiples of this.
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
        """These parameters in an order that leaves no holes, and that keeps the order of those of a kind."""
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
    """A named stretch of dynamic shared memory."""

    name: str
    offset: int
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class SmemMap:
    """The shared-memory map: read by the template (offsets) and by the launcher (size)."""

    regions: tuple[SmemRegion, ...] = ()

    @property
    def bytes(self) -> int:
        """Dynamic shared memory to ask for at launch."""
        return max((r.offset + r.bytes for r in self.regions), default=0)

    @property
    def sizes(self) -> str:
        """For people: each region and its bytes, but for small ones, and whose room it takes over."""
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
    """What the copy engine is told of a tensor (batch, row, head, column): which boxes of it are copied.

    A workspace of one dimension is rows as long as a box.
    """

    #: The tensor; the parameter is ``<tensor>_map``.
    tensor: str
    rows: int
    columns: int
    #: Within stretches of so many bytes of shared memory, 16-byte chunks change places.
    swizzle: int = 128
    #: Of the tensor, where that is not the spec's dtype.
    element: str | None = None

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
    #: Parts of the keys of a sequence that have blocks of their own.
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Constant:
    """One member of the kernel's ``constexpr`` config struct."""

    name: str
    value: int | bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One ``__global__`` function, decided completely; rendering and launching only read it."""

    #: The ``extern "C"`` symbol and file stem, e.g. ``forward_d128_causal_sm80``.
    name: str
    pass_: Pass
    role: Role
    algorithm: str
    template: str
    spec: AttentionSpec
    arch: Arch
    threads: int
    #: C++ struct name of the config, and its members in declaration order.
    config_type: str
    config: tuple[Constant, ...]
    params: ParamTable
    smem: SmemMap
    #: Blocks: ceil(length of grid_over / grid_tile) x heads of grid_heads x batch; over pairs: a tile of both; over
    #: rows: the longer of the packed rows of queries and of keys.
    grid_tile: int
    grid_over: Literal["q", "kv", "pairs", "rows"]
    grid_heads: Literal["q", "kv", "one"]
    #: Alignment in bytes that pointers and strides of the tensors must have.
    access_bytes: int
    min_blocks: int = 1
    #: Whether each sequence has blocks of its own.
    grid_batch: Literal["each", "one"] = "each"
    #: Blocks along x when their number does not depend on the problem.
    fixed_blocks: int | None = None
    #: Whether blocks take tiles from a counter until none is left, so that no more start than run at once.
    is_persistent: bool = False
    #: Whether it may start while the grid before it on the stream still runs, which it waits for itself.
    overlaps_predecessor: bool = False
    #: Whether each split of the keys has blocks of its own.
    grid_splits: bool = False
    #: What the copy engine moves: one tensor map each among the parameters.
    boxes: tuple[Box, ...] = ()
    #: Whether it cannot do with a scale of almost nothing.
    divides_by_scale: bool = False
    #: Why the schedule is what it is, one sentence each.
    reasons: tuple[str, ...] = ()
    #: What its tiles were chosen by, where they were weighed against others.
    choice: Choice | None = None
    #: The schedule that was asked for, as far as one was.
    schedule: Schedule | None = None
    #: Named switches that templates may test.
    switches: frozenset[str] = frozenset()
    #: What it evaluates of the spec's mask and score.
    expressions: Expressions | None = None
    #: What a kernel of captured gradients works on.
    captured: CapturedWork | None = None
    #: Where it sums dQ, if not for all heads at once.
    sums: SumRing | None = None

    @property
    def own_lengths(self) -> str:
        """What kernels call that which knows the lengths of a block's sequence; nothing where all are equally long."""
        names = {"varlen": "packed", "cached": "cached"}
        return next((name for switch, name in names.items() if switch in self.switches), "")

    def constant(self, name: str) -> int | bool:
        """A config member's value."""
        for c in self.config:
            if c.name == name:
                return c.value
        raise KeyError(name)

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        """Thread blocks along x (tiles), y (heads) and z (sequences); a 0 means: nothing to launch.

        Of a persistent kernel these are the tiles, all along x; the launch starts no more blocks than run at once.
        """
        if self.fixed_blocks is not None:
            return self.fixed_blocks, 1, 1
        heads = {"q": problem.heads_q, "kv": problem.heads_kv, "one": 1}[self.grid_heads]
        batch = problem.batch if self.grid_batch == "each" else 1
        if self.grid_over == "pairs":
            tiles = -(-problem.len_q // self.grid_tile) * -(-problem.len_kv // int(self.constant("tile_kv")))
            return tiles, heads, batch
        lengths = {"q": problem.len_q, "kv": problem.len_kv, "rows": max(problem.len_q, problem.len_kv)}
        tiles = -(-lengths[self.grid_over] // self.grid_tile) * (problem.splits if self.grid_splits else 1)
        return (tiles * heads * batch, 1, 1) if self.is_persistent else (tiles, heads, batch)

    def __str__(self) -> str:
        from flashgen.plan.model.printing import printed_kernel

        return printed_kernel(self)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All kernels of a spec on an architecture, with the schedule as completed by the heuristics."""

    spec: AttentionSpec
    schedule: Schedule
    arch: Arch
    kernels: tuple[KernelPlan, ...] = field(repr=False)

    def kernel(self, role: Role) -> KernelPlan:
        """The kernel that plays ``role``."""
        for k in self.kernels:
            if k.role == role:
                return k
        raise KeyError(role)

    def has(self, role: Role) -> bool:
        """Whether some kernel plays ``role``."""
        return any(k.role == role for k in self.kernels)

    def __str__(self) -> str:
        from flashgen.plan.model.printing import printed

        return printed(self)
