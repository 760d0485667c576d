"""Planning the backward kernels for Hopper: prepare, main, which makes dK, dV and dQ, or its sum, and then finish."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.plan import params
from flashgen.plan.backward_wide_sm90 import WIDE_DIMS, plan_wide_sm90
from flashgen.plan.forward_sm90 import PANEL, ROWS, STORED_ROWS, WARPGROUP, why_not_hopper
from flashgen.plan.model import Box, Constant, KernelPlan, ParamTable, Role, SmemMap
from flashgen.plan.naming import kernel_name
from flashgen.plan.smem import SmemLayout
from flashgen.plan.sum_ring import SumRing
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule

_CONSUMERS = 2
_TILE_KV = ROWS * _CONSUMERS
_DS_SLOTS = 2
#: What a warp hands to the copy engine of dQ at a time: 16 rows of 64 floats.
_DQ_BYTES = STORED_ROWS * PANEL * 4
#: Floats of a line of the workspace; it comes and goes two lines at a time.
_SUM_LINE = 256


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the schedule table."""

    tile_q: int
    q_slots: int
    do_slots: int
    reason: str
    #: Registers per thread of producers and consumers.
    registers: tuple[int, int] = (24, 240)
    #: Parts of dQ under way to be finished, and how many of them are rounded.
    sum_slots: int = 3
    rounded_slots: int = 1


_TABLE = {
    (64, 64): _Row(
        128, 2, 2, "the longest tile of queries whose scores and gradients find registers", sum_slots=4, rounded_slots=2
    ),
    (96, 96): _Row(
        64,
        3,
        2,
        "dK and dV take half of the registers, which leaves them for 64 queries",
        (40, 232),
    ),
    (128, 128): _Row(
        64,
        3,
        2,
        "dK and dV take half of the registers, which leaves them for 64 queries",
        (40, 232),
    ),
}
#: Those of one kernel that keeps dK and dV of its keys and adds to a sum of dQ.
NARROW_DIMS = tuple(_TABLE)
HEAD_DIMS = (*NARROW_DIMS, *WIDE_DIMS)
#: By whether the mask is full, and whether dQ is summed in a fixed order.
_MAIN_PARAMS = {
    (True, False): params.MAIN_SM90,
    (False, False): params.MAIN_SM90_MASKED,
    (True, True): params.MAIN_SM90_ORDERED,
    (False, True): params.MAIN_SM90_ORDERED_MASKED,
}


def why_not_backward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a backward pass runs by the kernels for all GPUs instead, in a clause; None where it need not."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
        dims = ", ".join(str(d) if d == v else f"{d} with head_dim_v={v}" for d, v in HEAD_DIMS)
        return f"its backward kernels are made for head_dim {dims}"
    if schedule.backward != BackwardSchedule():
        return "a schedule for the backward pass is one of the other kernels"
    return None


def plan_backward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels of a spec on Hopper, in the order in which they run."""
    asked = schedule if schedule != Schedule() else None
    if (spec.head_dim, spec.head_dim_v) in WIDE_DIMS:
        return plan_wide_sm90(spec, asked, arch)
    common = _Common(spec, arch, _TABLE[spec.head_dim, spec.head_dim_v], asked)
    kernels = (common.prepare(), common.main())
    return (*kernels, common.finish()) if spec.deterministic else kernels


@dataclass(frozen=True, slots=True)
class _Common:
    spec: AttentionSpec
    arch: Arch
    row: _Row
    schedule: Schedule | None

    @property
    def _scales(self) -> bool:
        """Whether logits are nothing but scaled products, so that L can be taken off before the scale."""
        return self.spec.score is None or not self.spec.score.changes_logits

    @property
    def _section_heads(self) -> int:
        """Heads that are worked on at the same time; longest tiles go first where their lengths differ."""
        mask = self.spec.mask
        # Tiles of one head follow one another when they add in a fixed order: few are to be in work at once.
        return 16 if mask.has_upper or not mask.is_band or self.spec.deterministic else 1

    @property
    def _sum_slots(self) -> int:
        """Parts of dQ that the main kernel is finishing at once."""
        return 0 if self.spec.deterministic else self.row.sum_slots

    def prepare(self) -> KernelPlan:
        """What the rows of queries subtract, and a cleared workspace."""
        return self._kernel(
            "prepare",
            "backward_prepare.cu.j2",
            threads=256,
            config_type="PrepareConfig",
            config=(
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", self.row.tile_q),
                Constant("workspace_floats", self.row.tile_q * self.spec.head_dim, "of dQ, per tile of queries"),
                Constant("access_bytes", 16, "alignment of rows in global memory"),
            ),
            params=params.PREPARE_SM90_ORDERED if self.spec.deterministic else params.PREPARE_SM90,
            smem=SmemMap(),
            switches={
                "workspace",
                "row_stats",
                *(["scales"] if self._scales else []),
                *(["ordered"] if self.spec.deterministic else []),
            },
        )

    def main(self) -> KernelPlan:
        """dK and dV, and what each tile of keys adds to dQ."""
        row, mask = self.row, self.spec.mask
        producer, consumer = row.registers
        finished = (Box("dq_accum", 2, _SUM_LINE, swizzle=0, element="fp32"), Box("dq", STORED_ROWS, PANEL))
        return self._kernel(
            "main",
            "backward_main_sm90.cu.j2",
            threads=WARPGROUP * (_CONSUMERS + 1),
            config_type="BackwardSm90Config",
            config=(
                Constant("head_dim", self.spec.head_dim),
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", row.tile_q, "B_r: query rows per step"),
                Constant("tile_kv", _TILE_KV, "B_c: keys per tile that a block works on"),
                Constant("q_slots", row.q_slots, "tiles of Q under way at once"),
                Constant("do_slots", row.do_slots, "tiles of dO under way at once"),
                Constant("ds_slots", _DS_SLOTS, "tiles of dS that wait for dQ"),
                Constant("sum_slots", self._sum_slots, "parts of dQ under way to be finished"),
                Constant("rounded_slots", row.rounded_slots if self._sum_slots else 0, "of them that are rounded"),
                Constant("consumers", _CONSUMERS, "warpgroups that compute, 64 keys each"),
                Constant("producer_registers", producer),
                Constant("consumer_registers", consumer),
                Constant("section_heads", self._section_heads, "heads that are worked on at the same time"),
                Constant("has_lower", mask.has_lower, "the mask ends on the left"),
                Constant("has_upper", mask.has_upper, "the mask ends on the right"),
            ),
            params=_MAIN_PARAMS[mask.is_full, self.spec.deterministic],
            smem=self._smem(),
            over="kv",
            boxes=(
                Box("q", row.tile_q, PANEL),
                Box("k", _TILE_KV, PANEL),
                Box("v", _TILE_KV, PANEL),
                Box("dout", row.tile_q, PANEL),
                Box("row_stats", 1, row.tile_q, swizzle=0, element="fp32"),
                Box("dk", STORED_ROWS, PANEL),
                Box("dv", STORED_ROWS, PANEL),
                *(() if self.spec.deterministic else finished),
            ),
            reasons=(row.reason,),
            switches={
                name
                for name, on in (
                    ("masked", not mask.is_full),
                    ("listed", not mask.is_band),
                    ("scales", self._scales),
                    ("ordered", self.spec.deterministic),
                )
                if on
            },
        )

    def finish(self) -> KernelPlan:
        """dQ from the workspace to its dtype, where all heads have a sum."""
        return self._kernel(
            "finish",
            "backward_finish_sm90.cu.j2",
            threads=WARPGROUP * _CONSUMERS,
            config_type="FinishConfig",
            config=(
                Constant("head_dim", self.spec.head_dim),
                Constant("tile_q", self.row.tile_q),
                Constant("consumers", _CONSUMERS, "warpgroups that made dQ"),
            ),
            params=params.FINISH,
            smem=SmemMap(),
            switches={"narrow_end"} if self.spec.head_dim % PANEL else set(),
        )

    def _kernel(
        self,
        role: Role,
        template: str,
        *,
        threads: int,
        config_type: str,
        config: tuple[Constant, ...],
        params: ParamTable,
        smem: SmemMap,
        over: str = "q",
        boxes: tuple[Box, ...] = (),
        reasons: tuple[str, ...] = (),
        switches: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> KernelPlan:
        by_keys = over == "kv"
        return KernelPlan(
            name=kernel_name(self.spec, role, self.arch),
            pass_="backward",
            role=role,
            algorithm="FlashAttention-3",
            template=template,
            spec=self.spec,
            arch=self.arch,
            threads=threads,
            config_type=config_type,
            config=config,
            params=params,
            smem=smem,
            grid_tile=_TILE_KV if by_keys else self.row.tile_q,
            grid_over="kv" if by_keys else "q",
            grid_heads="kv" if by_keys else "q",
            access_bytes=16,
            is_persistent=bool(boxes),
            boxes=boxes,
            divides_by_scale=bool(boxes) and self._scales,
            reasons=reasons,
            schedule=self.schedule,
            switches=frozenset(switches),
            sums=None if self.spec.deterministic else SumRing(_TILE_KV, self._section_heads),
        )

    def _smem(self) -> SmemMap:
        row, size = self.row, self.spec.element.bytes
        dim, dim_v = (-(-d // PANEL) * PANEL * size for d in (self.spec.head_dim, self.spec.head_dim_v))
        q_slots, do_slots = f"{row.q_slots} slots", f"{row.do_slots} slots"
        layout = (
            SmemLayout()
            .then("k", _TILE_KV * dim, "K_j")
            .then("v", _TILE_KV * dim_v, "V_j")
            .then("q", row.q_slots * row.tile_q * dim, f"Q_i, {q_slots}")
            .then("do", row.do_slots * row.tile_q * dim_v, f"dO_i, {do_slots}")
            .then("ds", _DS_SLOTS * _TILE_KV * row.tile_q * size, f"dS_ij, {_DS_SLOTS} slots")
            .then("dq", 4 * _CONSUMERS * _DQ_BYTES, "dQ_i, and at the end dK_j and dV_j, on their way out")
        )
        if not self.spec.deterministic:
            layout.then("sums", row.sum_slots * _DQ_BYTES, f"rows of dQ_i to be finished, {row.sum_slots} slots")
            layout.then("dq_rows", row.rounded_slots * STORED_ROWS * PANEL * size, "and when they are")
            layout.then("zeros", 2 * _SUM_LINE * 4, "what their sum is cleared with")
        (
            layout.then("lse", row.q_slots * row.tile_q * 4, f"what rows subtract from their logits, {q_slots}")
            .then("dsum", row.do_slots * row.tile_q * 4, f"-D_i, {do_slots}")
            .then("k_barriers", 16, "for each slot: it is full, it is empty")
            .then("v_barriers", 16)
            .then("q_barriers", 16 * row.q_slots)
            .then("do_barriers", 16 * row.do_slots)
            .then("ds_barriers", 16 * _DS_SLOTS)
        )
        if self.spec.deterministic:
            layout.then("dq_barriers", 32)
        else:
            layout.then("sum_barriers", 16 * row.sum_slots)
            layout.then("turn_barriers", 16)
            layout.then("sum_parts", 32 * row.sum_slots, "which parts of dQ the slots hold")
        layout.then("tile_barriers", 32).then("tiles", 32, "which tiles of keys come next")
        if not self.spec.mask.is_band:
            layout.then("listed_queries", 16 * row.q_slots, "which tiles of queries the slots hold")
        if not self.spec.mask.is_full:
            layout.then("found_bad", 16 * _CONSUMERS, "whether keys of each warp have bad values")
            if self.spec.deterministic:
                layout.then("added_slowly", 8, "whether dQ of the tiles of keys is added pair by pair")
        return layout.map()
