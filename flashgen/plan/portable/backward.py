"""Planning the portable backward kernels: prepare, main, and then query (deterministic) or finish."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.plan.model import params
from flashgen.plan.model.limits import Tiling, choose, smem_fault, stages_fault
from flashgen.plan.model.plans import Constant, KernelPlan, SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.plan.portable.backward_frame import BackwardFrame
from flashgen.plan.portable.backward_rows import main_rows, query_rows
from flashgen.plan.portable.forward import WARP, copies_asynchronously, padded
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule

#: Registers a thread may spend on the accumulators that are alive together.
_MAX_ACCUMULATORS = 208


def plan_backward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """The backward kernels of a spec, in the order in which they run."""
    given = _given(schedule.backward)
    asynchronous = copies_asynchronously(arch, access_bytes)
    tiling = choose(
        "backward",
        tuple(main_rows(spec, arch)),
        given,
        arch,
        lambda t: _main_fault(spec, arch, t, asynchronous),
        lambda t: _main_smem(spec, t).bytes,
    )
    shares = Shares.of(spec, tiling)
    made = _Kernels.of(spec, schedule, arch, access_bytes)
    kernels = [made.prepare(tiling), made.main(tiling, shares)]
    if spec.deterministic:
        kernels.append(plan_query(spec, schedule, arch, access_bytes))
    else:
        kernels.append(made.finish(tiling, shares))
    return tuple(kernels)


def plan_query(
    spec: AttentionSpec,
    schedule: Schedule,
    arch: Arch,
    access_bytes: int,
    *,
    lines: bool = False,
    tile_kv: int | None = None,
) -> KernelPlan:
    """The kernel that computes dQ, one block per tile of queries.

    ``lines`` adds shared memory for a float tile, in which columns or diagonals are summed.
    """
    tiling = choose(
        "dQ",
        tuple(query_rows(spec, arch)),
        {} if tile_kv is None else {"tile_kv": tile_kv},
        arch,
        lambda t: _query_fault(spec, arch, t, lines),
        lambda t: _query_smem(spec, t, lines).bytes,
    )
    return _Kernels.of(spec, schedule, arch, access_bytes).query(tiling, lines)


def workspace_tiles(prepare: KernelPlan) -> dict[str, int]:
    """Floats of each workspace per tile of queries."""
    stats = 2 * prepare.grid_tile if "row_stats" in prepare.params.names else 0
    semaphores = 1 if "dq_semaphore" in prepare.params.names else 0
    return {"dq_accum": int(prepare.constant("workspace_floats")), "row_stats": stats, "dq_semaphore": semaphores}


def chosen_backward(main: KernelPlan) -> BackwardSchedule:
    """The schedule that would give this plan."""
    names = ("tile_q", "tile_kv", "stages", "warps")
    return BackwardSchedule(**{n: int(main.constant(n)) for n in names})


@dataclass(frozen=True, slots=True)
class Shares:
    """How warps divide each product of the main kernel: the number of warps along its rows."""

    scores: int
    dk: int
    dv: int
    dq: int

    @classmethod
    def of(cls, spec: AttentionSpec, tiling: Tiling) -> Shares:
        """The division of each product that loads the fewest operand fragments; 0 if there is none."""
        dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        return cls(
            scores=_best_share(tiling.tile_q, tiling.tile_kv, tiling.warps),
            dk=_best_share(tiling.tile_kv, dim, tiling.warps),
            dv=_best_share(tiling.tile_kv, dim_v, tiling.warps),
            dq=_best_share(tiling.tile_q, dim, tiling.warps),
        )


def _best_share(rows: int, columns: int, warps: int) -> int:
    """Warps along the rows of a rows x columns product; 0 if it cannot be divided."""
    options = [
        above
        for above in (1, 2, 4, 8, 16)
        if warps % above == 0 and rows % (16 * above) == 0 and columns % (8 * (warps // above)) == 0
    ]

    # A warp loads the fragments of its rows and columns once per step, so the squarest share loads least. Prefer an
    # even number of column blocks, because ldmatrix loads them in pairs.
    def cost(above: int) -> tuple[int, int, int]:
        columns_each = columns // (warps // above)
        return rows // above + columns_each, columns_each % 16, above

    return min(options, key=cost, default=0)


class _Kernels(BackwardFrame):
    """The kernels of a pass."""

    __slots__ = ()

    @classmethod
    def of(cls, spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> _Kernels:
        """The kernels of a spec."""
        return cls(spec, arch, schedule if schedule != Schedule() else None, "FlashAttention-2", access_bytes)

    def prepare(self, tiling: Tiling) -> KernelPlan:
        """D = rowsum(dO * O), and a cleared workspace."""
        workspace = 0 if self.spec.deterministic else tiling.tile_q * padded(self.spec.head_dim)
        return self.kernel(
            "prepare",
            "backward_prepare.cu.j2",
            threads=256,
            config_type="PrepareConfig",
            config=(
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", tiling.tile_q),
                Constant("workspace_floats", workspace, "of the dQ workspace, per tile of queries"),
                Constant("access_bytes", self.access_bytes, "alignment of rows in global memory"),
            ),
            params=params.PREPARE_DETERMINISTIC if self.spec.deterministic else params.PREPARE,
            tile=tiling.tile_q,
        )

    def main(self, tiling: Tiling, shares: Shares) -> KernelPlan:
        """dK and dV, with dQ added to the workspace unless the spec is deterministic."""
        return self.kernel(
            "main",
            "backward_main.cu.j2",
            threads=tiling.warps * WARP,
            config_type="BackwardConfig",
            config=self._config(tiling, shares),
            params=params.MAIN_DETERMINISTIC if self.spec.deterministic else params.MAIN,
            smem=_main_smem(self.spec, tiling),
            tile=tiling.tile_kv,
            over="kv",
            reasons=(tiling.reason,) if tiling.reason else (),
        )

    def query(self, tiling: Tiling, lines: bool) -> KernelPlan:
        """dQ by itself, one block per tile of queries."""
        shares = Shares(tiling.warps, 1, 1, tiling.warps)
        return self.kernel(
            "query",
            "backward_query.cu.j2",
            threads=tiling.warps * WARP,
            config_type="BackwardConfig",
            config=self._config(tiling, shares),
            params=params.QUERY,
            smem=_query_smem(self.spec, tiling, lines),
            tile=tiling.tile_q,
            reasons=(tiling.reason,) if tiling.reason else (),
        )

    def finish(self, tiling: Tiling, shares: Shares) -> KernelPlan:
        """dQ from the workspace to its dtype."""
        size = tiling.tile_q * padded(self.spec.head_dim) * self.spec.element.bytes
        return self.kernel(
            "finish",
            "backward_finish.cu.j2",
            threads=tiling.warps * WARP,
            config_type="BackwardConfig",
            config=self._config(tiling, shares),
            params=params.FINISH,
            smem=SmemLayout().then("q", size, "dQ_i").map(),
            tile=tiling.tile_q,
        )

    def _config(self, tiling: Tiling, shares: Shares) -> tuple[Constant, ...]:
        spec, arch = self.spec, self.arch
        return (
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("tile_q", tiling.tile_q, "B_r: query rows per step"),
            Constant("tile_kv", tiling.tile_kv, "B_c: keys per block"),
            Constant("stages", tiling.stages, "slots for Q and dO"),
            Constant("warps", tiling.warps),
            Constant("score_warps", shares.scores, "warps along the rows of S, dP"),
            Constant("dk_warps", shares.dk, "on dK"),
            Constant("dv_warps", shares.dv, "on dV"),
            Constant("dq_warps", shares.dq, "on dQ"),
            Constant("has_lower", spec.mask.has_lower, "the band has a lower bound on k - q"),
            Constant("has_upper", spec.mask.has_upper, "the band has an upper bound on k - q"),
            Constant("vector_reduction", arch.has_vector_reduction, "four-wide additions to global memory"),
            Constant("access_bytes", self.access_bytes, "alignment of rows in global memory"),
            Constant("async_copy", copies_asynchronously(arch, self.access_bytes)),
            Constant("turing", not arch.has_cp_async, "mma.m16n8k8, as Turing has no k16"),
        )


def _given(schedule: BackwardSchedule) -> dict[str, int]:
    values = {n: getattr(schedule, n) for n in ("tile_q", "tile_kv", "stages", "warps")}
    return {n: v for n, v in values.items() if v is not None}


def _main_fault(spec: AttentionSpec, arch: Arch, tiling: Tiling, asynchronous: bool) -> str | None:
    shares = Shares.of(spec, tiling)
    if 0 in (shares.scores, shares.dk, shares.dv, shares.dq):
        return (
            f"{tiling.describe()} cannot be divided among {tiling.warps} warps in blocks of 16 x 8; "
            "use fewer warps or larger tiles."
        )
    if tiling.stages > 2:
        return f"stages={tiling.stages} is more than the backward kernel uses; use 1 or 2."
    if tiling.stages > 1 and not asynchronous:
        return stages_fault(arch, tiling)
    threads = tiling.warps * WARP
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    accumulators = tiling.tile_kv * (dim + dim_v) / threads
    accumulators += max(2 * tiling.tile_q * tiling.tile_kv, tiling.tile_q * dim) / threads
    if accumulators > _MAX_ACCUMULATORS:
        return (
            f"{tiling.describe()} needs {accumulators:g} registers per thread for accumulators alone "
            f"(at most {_MAX_ACCUMULATORS}); use smaller tiles or more warps."
        )
    return smem_fault(arch, tiling, _main_smem(spec, tiling).bytes)


def _query_fault(spec: AttentionSpec, arch: Arch, tiling: Tiling, lines: bool) -> str | None:
    return smem_fault(arch, tiling, _query_smem(spec, tiling, lines).bytes)


def _main_smem(spec: AttentionSpec, tiling: Tiling) -> SmemMap:
    size = spec.element.bytes
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    slots = f", {tiling.stages} slots" if tiling.stages > 1 else ""
    return (
        SmemLayout()
        .then("k", tiling.tile_kv * dim * size, "K_j, and dK_j at the end")
        .then("v", tiling.tile_kv * dim_v * size, "V_j, and dV_j at the end")
        .then("q", tiling.stages * tiling.tile_q * dim * size, "Q_i" + slots)
        .then("do", tiling.stages * tiling.tile_q * dim_v * size, "dO_i" + slots)
        .then("p", tiling.tile_q * tiling.tile_kv * size, "P_ij")
        .then("ds", tiling.tile_q * tiling.tile_kv * size, "dS_ij")
        .then("lse", tiling.stages * tiling.tile_q * 4, "L_i" + slots)
        .then("dsum", tiling.stages * tiling.tile_q * 4, "D_i" + slots)
        .map()
    )


def _query_smem(spec: AttentionSpec, tiling: Tiling, lines: bool) -> SmemMap:
    size = spec.element.bytes
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    layout = (
        SmemLayout()
        .then("q", tiling.tile_q * dim * size, "Q_i, and dQ_i at the end")
        .then("do", tiling.tile_q * dim_v * size, "dO_i")
        .then("k", tiling.tile_kv * dim * size, "K_j")
        .then("v", tiling.tile_kv * dim_v * size, "V_j")
        .then("lse", tiling.tile_q * 4, "L_i")
        .then("dsum", tiling.tile_q * 4, "D_i")
    )
    if lines:
        # Eight more floats per row avoid bank conflicts.
        layout.then("lines", tiling.tile_q * (tiling.tile_kv + 8) * 4, "dS_ij times a slope")
    return layout.map()
