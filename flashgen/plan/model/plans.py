"""The plan: every decision about a kernel, taken once, as frozen values that print well."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashgen.arch import Arch
from flashgen.common.columns import columns
from flashgen.common.html import markup, table
from flashgen.plan.model.budget import Choice
from flashgen.plan.model.captured_work import CapturedWork
from flashgen.plan.model.expressions import Expressions, ScoreForm
from flashgen.plan.model.failed_tiles import FailedTiles
from flashgen.plan.model.parts import Box, Constant, Param, ParamTable, Problem, SmemMap, SmemRegion, Workspace
from flashgen.plan.model.sum_ring import SumRing
from flashgen.plan.model.tuning import Tuning
from flashgen.spec import AttentionSpec, Schedule

__all__ = [
    "AttentionPlan",
    "Box",
    "Constant",
    "KernelPlan",
    "Param",
    "ParamTable",
    "Pass",
    "Problem",
    "Role",
    "SmemMap",
    "SmemRegion",
    "Workspace",
]

Pass = Literal["forward", "backward"]
#: forward; prepare: D = rowsum(dO * O); main: dK, dV and dQ; query: dQ without atomics; finish: dQ to dtype.
#: repair: tiles of gradients that NaN or infinity spoiled.
#: append: new keys and values into a cache; combine: O and L of several splits of the keys.
#: quantize: 16-bit queries, keys and values to 8 bits and scales.
#: survey, before either pass: tables of the extremes of captured tensors.
#: clear_gaps, after either pass: zeros in packed rows outside every sequence.
#: captured_...: gradients of captured tensors; one captured_tile0, captured_tile1 ... for each bias.
Role = str

_COLUMNS = ("kernel", "tile", "stages", "warps", "shared memory", "grid (x, y, z)")


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
    #: Blocks: ceil(length of grid_over / grid_tile) x heads of grid_heads x batch. Over pairs: a tile of queries and
    #: one of keys; over scores: the same, but at least one block for each tile of queries. Over rows: the longer of the
    #: rows of queries and of keys. Over heads: one block for each. Over flags: of tiles to repair.
    grid_tile: int
    grid_over: Literal["q", "kv", "pairs", "scores", "rows", "heads", "flags"]
    #: Over all heads: those of queries, then those of keys, then those of values.
    grid_heads: Literal["q", "kv", "all", "one"]
    #: Alignment in bytes that pointers and strides of the tensors must have.
    access_bytes: int
    min_blocks: int = 1
    #: Whether sequences multiply the grid.
    grid_batch: Literal["each", "one"] = "each"
    #: Blocks along x when their number does not depend on the problem.
    fixed_blocks: int | None = None
    #: Whether the grid has only resident blocks, which draw tiles from a counter.
    is_persistent: bool = False
    #: The words of its counter in global memory, which are 0 between launches.
    counters: int = 2
    #: Whether it uses programmatic dependent launch.
    overlaps_predecessor: bool = False
    #: Whether all blocks run at the same time, so that they may wait for each other.
    is_cooperative: bool = False
    #: Whether splits of the keys multiply the grid.
    grid_splits: bool = False
    #: TMA boxes: one tensor map each among the parameters.
    boxes: tuple[Box, ...] = ()
    #: Columns of each of its products by wgmma.
    product_columns: tuple[int, ...] = ()
    #: Whether it divides by the scale, which must then not be tiny.
    divides_by_scale: bool = False
    #: Whether it is refused if it spills: its exponentials run between two products, where there is no time for it.
    refuses_spills: bool = False
    #: Why the schedule is what it is, one sentence each.
    reasons: tuple[str, ...] = ()
    #: The choice among candidate tiles, if there were any.
    choice: Choice | None = None
    #: The schedule as the caller gave it; None if it sets nothing.
    schedule: Schedule | None = None
    #: What it leaves in device memory for kernels after it in the same pass.
    workspaces: tuple[Workspace, ...] = ()
    #: Choices that nothing else of the plan says, by name: templates test them.
    switches: frozenset[str] = frozenset()
    #: What it evaluates of the spec's mask and score.
    expressions: Expressions | None = None
    #: How it computes the score.
    score: ScoreForm | None = None
    #: What a kernel of captured gradients works on.
    captured: CapturedWork | None = None
    #: The ring in which it sums dQ; None if dQ of all heads has a sum.
    sums: SumRing | None = None
    #: The flags of tiles that a repair kernel computes again; None if there is no such kernel.
    failures: FailedTiles | None = None

    @property
    def own_lengths(self) -> str:
        """The name, in the source, of the struct with the lengths of a block's sequence; empty if lengths are equal."""
        # The bottom-right corner of a mask then differs from sequence to sequence, so that kernels take both bands.
        if "corner_lower" not in self.params.names:
            return ""
        return "packed" if self.spec.varlen else "cached"

    @property
    def evaluates_sink(self) -> bool:
        """Whether it evaluates the score's sink. Backward kernels do not: the log-sum-exp includes the sink."""
        has_sink = self.expressions is not None and self.expressions.sink is not None
        return has_sink and (self.pass_ == "forward" or self.role == "captured_sink")

    @property
    def applies_dropout(self) -> bool:
        """Whether its results depend on which pairs are dropped."""
        return "dropout_factor" in self.params.names

    @property
    def adds_in_order(self) -> bool:
        """Whether thread blocks add to dQ in a fixed order, which a semaphore for each tile of dQ enforces."""
        return "dq_semaphore" in self.params.names

    @property
    def stages(self) -> int | None:
        """The stages that a schedule sets. If K and V have stages of their own, those of V."""
        return next((int(c.value) for c in self.config if c.name in ("stages", "v_stages")), None)

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
        if self.grid_over == "flags":
            assert self.failures is not None, "flags of a kernel that repairs"
            return -(-self.failures.flags(problem) // self.grid_tile), 1, 1
        every = problem.heads_q + 2 * problem.heads_kv
        heads = {"q": problem.heads_q, "kv": problem.heads_kv, "all": every, "one": 1}[self.grid_heads]
        batch = problem.batch if self.grid_batch == "each" else 1
        if self.grid_over == "heads":
            return 1, heads, batch
        if self.grid_over in ("pairs", "scores"):
            kv_tiles = -(-problem.len_kv // int(self.constant("tile_kv")))
            kv_tiles = max(kv_tiles, 1) if self.grid_over == "scores" else kv_tiles
            return -(-problem.len_q // self.grid_tile) * kv_tiles, heads, batch
        lengths = {"q": problem.len_q, "kv": problem.len_kv, "rows": max(problem.len_q, problem.len_kv)}
        tiles = -(-lengths[self.grid_over] // self.grid_tile) * (problem.splits if self.grid_splits else 1)
        return (tiles * heads * batch, 1, 1) if self.is_persistent else (tiles, heads, batch)

    @property
    def has_tiles(self) -> bool:
        """Whether it works on tiles of queries and keys."""
        return {"tile_q", "tile_kv"} <= {member.name for member in self.config}

    def extents(self, workspace: Workspace, problem: Problem) -> tuple[int, ...]:
        """The shape of one of its workspaces."""

        def extent(name: str) -> int:
            if name in ("q_tiles", "kv_tiles"):
                side = name.removesuffix("_tiles")
                return -(-int(getattr(problem, f"len_{side}")) // int(self.constant(f"tile_{side}")))
            if name == "padded_dim_v":
                return -(-self.spec.head_dim_v // 16) * 16
            return int(getattr(self.spec if name.startswith("head_dim") else problem, name))

        return tuple(extent(name) for name in workspace.extents)

    def __str__(self) -> str:
        name, *cells = _cells(self)
        labels = ("tile", "stages", "warps", "shared memory", "grid")
        parts = ", ".join(f"{label} {cell}" for label, cell in zip(labels, cells, strict=True) if cell != "-")
        return f"{name}: {parts}"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All kernels of a spec on an architecture, with the schedule as completed by the heuristics."""

    spec: AttentionSpec
    schedule: Schedule
    arch: Arch
    kernels: tuple[KernelPlan, ...] = field(repr=False)
    #: The search that the schedule comes from, if one was made on the GPU that it is planned for.
    tuning: Tuning | None = field(default=None, repr=False, compare=False)

    @property
    def access_bytes(self) -> int:
        """The alignment in bytes that the widest accesses of its kernels need."""
        return max(kernel.access_bytes for kernel in self.kernels)

    def kernel(self, role: Role) -> KernelPlan:
        """The kernel that plays ``role``."""
        for k in self.kernels:
            if k.role == role:
                return k
        raise KeyError(role)

    @property
    def forward(self) -> KernelPlan:
        """The kernel for any forward call; where no other reads the cache, that is the decode kernel."""
        return self.kernel("forward" if self.has("forward") else "decode")

    @property
    def stores_probabilities(self) -> bool:
        """Whether the forward pass leaves P in device memory."""
        return any(workspace.name == "probabilities" for k in self.kernels for workspace in k.workspaces)

    def has(self, role: Role) -> bool:
        """Whether some kernel plays ``role``."""
        return any(k.role == role for k in self.kernels)

    @property
    def title(self) -> str:
        """What the kernels compute, and for which GPUs."""
        return f"{self.spec.describe()}, for {self.arch.name} ({self.arch.example})"

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """The heads of the columns, and a row for each kernel."""
        return _COLUMNS, *map(_cells, self.kernels)

    def __str__(self) -> str:
        tuned = [] if self.tuning is None else ["", str(self.tuning)]
        return "\n".join([self.title, *columns(self.table), *tuned])

    def _repr_html_(self) -> str:
        heads, *rows = self.table
        return markup(table(heads, rows, self.title))


def _cells(kernel: KernelPlan) -> tuple[str, ...]:
    values = {member.name: str(member.value) for member in kernel.config}
    tile = f"{values['tile_q']} x {values['tile_kv']}" if kernel.has_tiles else "-"
    smem = f"{kernel.smem.bytes} bytes" if kernel.smem.bytes else "-"
    return kernel.name, tile, str(kernel.stages or "-"), str(kernel.threads // 32), smem, _grid(kernel)


def _grid(kernel: KernelPlan) -> str:
    if kernel.fixed_blocks is not None:
        return f"({kernel.fixed_blocks}, 1, 1)"
    if kernel.grid_over == "flags":
        assert kernel.failures is not None, "flags of a kernel that repairs"
        tiles_q, tiles_kv = f"ceil(Sq / {kernel.failures.tile_q})", f"ceil(Sk / {kernel.failures.tile_kv})"
        return f"(ceil(({tiles_q} * H + {tiles_kv} * Hk) * B / {kernel.grid_tile}), 1, 1)"
    if kernel.grid_over == "heads":
        tiles = "1"
    elif kernel.grid_over in ("pairs", "scores"):
        tiles = f"ceil(Sq / {kernel.grid_tile}) * ceil(Sk / {kernel.constant('tile_kv')})"
    else:
        longer = "max(total_q, total_kv)" if kernel.grid_batch == "one" else "max(Sq, Sk)"
        length = {"q": "Sq", "kv": "Sk", "rows": longer}[kernel.grid_over]
        tiles = length if kernel.grid_tile == 1 else f"ceil({length} / {kernel.grid_tile})"
    tiles += " * splits" if kernel.grid_splits else ""
    heads = {"q": "H", "kv": "Hk", "all": "H + 2 * Hk", "one": "1"}[kernel.grid_heads]
    batch = "B" if kernel.grid_batch == "each" else "1"
    if kernel.is_persistent:
        return f"as many blocks as run at once, for {tiles} * {heads} * {batch} tiles"
    return f"({tiles}, {heads}, {batch})"
