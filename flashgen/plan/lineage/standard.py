"""Planning standard attention: S, P and dS of all pairs lie in device memory, between kernels that each do one step.

The forward pass has three kernels: S = scale * Q K^T, P = softmax(S), O = P V. The backward pass reads P again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.model import params
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.plans import Constant, KernelPlan, ParamTable, Pass, Role, SmemMap, Workspace
from flashgen.plan.model.smem import SmemLayout
from flashgen.plan.portable.forward import WARP, copies_asynchronously, padded
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule

ALGORITHM = "standard attention"
#: Rows of a block's tile of a product, and of a tile of S its columns.
TILE = 128
WARPS = 8
#: Bytes of each row that a step of a product takes.
DEPTH_BYTES = 64
SOFTMAX_WARPS = 4
#: Of four scores each: how many a thread of the softmax kernel keeps in registers. Longer rows are read twice.
HELD = 8
#: Rows of O and dO that a block of the prepare kernel works on.
PREPARE_ROWS = 64
_PAIRS = ("batch", "heads_q", "len_q", "score_pitch")


def plan_standard(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """The kernels of the forward pass: scores, softmax, and O = P V."""
    made = _Kernels(spec, schedule, arch, access_bytes)
    return made.scores(), made.softmax(), made.rows("forward", spec.head_dim_v, params.STANDARD_FORWARD)


def plan_standard_backward(
    spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int
) -> tuple[KernelPlan, ...]:
    """The kernels of the backward pass, which reads P: D, dS, dV, dQ and dK. None of them uses atomics."""
    if schedule.backward != BackwardSchedule():
        raise PlanError("algorithm='standard' has no tiles of a backward pass to choose; leave backward out.")
    made = _Kernels(spec, schedule, arch, access_bytes)
    return (
        made.prepare(),
        made.score_gradients(),
        made.columns("dv", spec.head_dim_v, params.STANDARD_DV),
        made.rows("dq", spec.head_dim, params.STANDARD_DQ),
        made.columns("dk", spec.head_dim, params.STANDARD_DK),
    )


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of both passes."""

    spec: AttentionSpec
    schedule: Schedule
    arch: Arch
    access_bytes: int

    @property
    def _depth(self) -> int:
        return DEPTH_BYTES // self.spec.element.bytes

    @property
    def _stages(self) -> int:
        """A ring as deep as asynchronous copies can fill; elsewhere registers hold the next tile."""
        return 4 if self.arch.has_cp_async else 2

    def scores(self) -> KernelPlan:
        """S = scale * Q K^T, in float32."""
        return self._of_pairs("scores", "forward", params.STANDARD_SCORES, Workspace("scores", "fp32", _PAIRS))

    def score_gradients(self) -> KernelPlan:
        """dS = P * (dO V^T - D)."""
        return self._of_pairs("ds", "backward", params.STANDARD_DS, Workspace("dscores", None, _PAIRS))

    def softmax(self) -> KernelPlan:
        """P = softmax(S): one block for each row."""
        spec = self.spec
        return self._kernel(
            "softmax",
            "forward",
            "lineage/standard_softmax.cu.j2",
            warps=SOFTMAX_WARPS,
            config_type="SoftmaxConfig",
            config=(
                Constant("warps", SOFTMAX_WARPS),
                Constant("held", HELD, f"rows of up to {HELD * 4 * SOFTMAX_WARPS * WARP} scores are read once"),
                Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
                Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
            ),
            params=params.STANDARD_SOFTMAX,
            smem=SmemLayout().then("reductions", 2 * SOFTMAX_WARPS * 4, "a maximum and a sum of each warp").map(),
            tile=1,
            over="q",
            workspaces=(Workspace("probabilities", None, _PAIRS),),
        )

    def rows(self, role: Role, dim: int, table: ParamTable) -> KernelPlan:
        """O = P V or dQ = dS K: a tile of rows, over all keys."""
        return self._kernel(
            role,
            "forward" if role == "forward" else "backward",
            "lineage/standard_rows.cu.j2",
            config=self._config(TILE, self._depth),
            params=table,
            smem=self._ring(padded(dim)),
            tile=TILE,
            over="q",
        )

    def columns(self, role: Role, dim: int, table: ParamTable) -> KernelPlan:
        """dV = P^T dO or dK = dS^T Q: a tile of keys, over all queries."""
        return self._kernel(
            role,
            "backward",
            "lineage/standard_columns.cu.j2",
            config=self._config(self._depth, TILE),
            params=table,
            smem=self._ring(padded(dim)),
            tile=TILE,
            over="kv",
        )

    def prepare(self) -> KernelPlan:
        """D = rowsum(dO * O)."""
        return self._kernel(
            "prepare",
            "backward",
            "backward_prepare.cu.j2",
            config_type="PrepareConfig",
            config=(
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", PREPARE_ROWS),
                Constant("workspace_floats", 0, "there is no dQ workspace"),
                Constant("access_bytes", self.access_bytes, "alignment of rows in global memory"),
            ),
            params=params.PREPARE_DETERMINISTIC,
            smem=SmemMap(),
            tile=PREPARE_ROWS,
            over="q",
        )

    def _of_pairs(self, role: Role, pass_: Pass, table: ParamTable, workspace: Workspace) -> KernelPlan:
        """A kernel whose blocks compute a tile of S or dS each."""
        return self._kernel(
            role,
            pass_,
            "lineage/standard_scores.cu.j2",
            config=self._config(TILE, TILE, Constant("depth", self._depth, "columns of a head, summed over at once")),
            params=table,
            smem=self._ring(TILE, holds_results=False),
            tile=TILE,
            over="pairs",
            workspaces=(workspace,),
        )

    def _config(self, tile_q: int, tile_kv: int, *depth: Constant) -> tuple[Constant, ...]:
        spec, arch = self.spec, self.arch
        return (
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("tile_q", tile_q, "summed over at once" if tile_q < TILE else ""),
            Constant("tile_kv", tile_kv, "summed over at once" if tile_kv < TILE else ""),
            *depth,
            Constant("stages", self._stages, "tiles of each operand in shared memory"),
            Constant("warps", WARPS),
            Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
            Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
            Constant("row_access_bytes", self.access_bytes, "alignment of rows of Q, K, V, O"),
            Constant("row_async_copy", copies_asynchronously(arch, self.access_bytes)),
            Constant("turing", not arch.has_cp_async, "half-depth tensor-core steps"),
        )

    def _ring(self, columns: int, *, holds_results: bool = True) -> SmemMap:
        """Tiles of both operands, and at the end of a product its results."""
        size = self.spec.element.bytes
        ring = self._stages * self._depth * (TILE + columns) * size
        if not holds_results:
            return SmemLayout().then("ring", ring, "tiles of both operands").map()
        return SmemLayout().then("ring", max(ring, TILE * columns * size), "tiles of both operands, then results").map()

    def _blocks(self, smem: SmemMap) -> int:
        """Blocks of a product on a multiprocessor. Floats, and tiles that wait in registers, leave room for one."""
        spec, arch = self.spec, self.arch
        few_registers = spec.element.is_half and copies_asynchronously(arch, self.access_bytes)
        few_registers &= not arch.spills_wide_tiles
        fits = 2 * (smem.bytes + arch.reserved_smem_per_block) <= arch.smem_per_multiprocessor
        return 2 if few_registers and fits else 1

    def _kernel(
        self,
        role: Role,
        pass_: Pass,
        template: str,
        *,
        warps: int = WARPS,
        config_type: str = "StandardConfig",
        config: tuple[Constant, ...],
        params: ParamTable,
        smem: SmemMap,
        tile: int,
        over: Literal["q", "kv", "pairs"],
        workspaces: tuple[Workspace, ...] = (),
    ) -> KernelPlan:
        return KernelPlan(
            name=kernel_name(self.spec, role, self.arch, "standard"),
            pass_=pass_,
            role=role,
            algorithm=ALGORITHM,
            template=template,
            spec=self.spec,
            arch=self.arch,
            threads=warps * WARP,
            config_type=config_type,
            config=config,
            params=params,
            smem=smem,
            grid_tile=tile,
            grid_over=over,
            grid_heads="kv" if over == "kv" else "q",
            access_bytes=self.access_bytes,
            min_blocks=self._blocks(smem) if config_type == "StandardConfig" else 1,
            schedule=self.schedule,
            workspaces=workspaces,
        )
