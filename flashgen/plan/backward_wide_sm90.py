"""Planning the backward kernels for Hopper of wide heads: one keeps keys and sums dK and dV, one keeps queries and sums
dQ. Seven products instead of five, but every sum stays in registers: nothing is added in memory, in no order."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.plan import params
from flashgen.plan.forward_sm90 import PANEL, ROWS, WARPGROUP
from flashgen.plan.model import Box, Constant, KernelPlan, ParamTable, Role, SmemMap
from flashgen.plan.naming import kernel_name
from flashgen.plan.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

_CONSUMERS = 2
_TILE_SLOTS = 2


@dataclass(frozen=True, slots=True)
class _Keys:
    """How dK and dV are made, of 64 keys at a time."""

    tile_q: int
    q_slots: int
    do_slots: int
    p_slots: int
    #: Whether a step's sum is issued before the next step's pairs: slots are free earlier, exponentials overlap less.
    sums_first: bool
    reason: str
    registers: tuple[int, int] = (40, 232)


@dataclass(frozen=True, slots=True)
class _Query:
    """How dQ is made, of 128 queries at a time."""

    tile_kv: int
    k_slots: int
    v_slots: int
    reason: str
    registers: tuple[int, int] = (40, 232)


_TABLE = {
    (192, 128): (
        _Keys(64, 3, 3, 2, False, "three tiles of Q and dO under way, so that each consumer has a product ahead"),
        _Query(80, 2, 2, "two tiles of keys and values under way"),
    ),
    (192, 192): (
        _Keys(64, 3, 3, 2, False, "three tiles of Q and dO under way, so that each consumer has a product ahead"),
        _Query(80, 2, 2, "two tiles of keys and values under way"),
    ),
    (256, 256): (
        _Keys(64, 2, 2, 2, True, "shared memory has room for four tiles of Q and dO, which sums are to free early"),
        _Query(64, 2, 1, "the widest tile of keys of which two find room", (24, 240)),
    ),
}
WIDE_DIMS = tuple(_TABLE)
#: Where a mask leaves holes and the table's tile of keys would not leave registers to evaluate it.
_LISTED = {(256, 256): _Query(48, 2, 2, "fewer keys, as a mask with holes takes registers")}


def plan_wide_sm90(spec: AttentionSpec, schedule: Schedule | None, arch: Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels of a spec with wide heads on Hopper, in the order in which they run."""
    keys, query = _TABLE[spec.head_dim, spec.head_dim_v]
    if not spec.mask.is_band:
        query = _LISTED.get((spec.head_dim, spec.head_dim_v), query)
    common = _Common(spec, schedule, arch)
    return common.prepare(keys), common.main(keys), common.query(query, keys.tile_q)


@dataclass(frozen=True, slots=True)
class _Common:
    spec: AttentionSpec
    schedule: Schedule | None
    arch: Arch

    @property
    def _scales(self) -> bool:
        """Whether logits are nothing but scaled products, so that L can be taken off before the scale."""
        return self.spec.score is None or not self.spec.score.changes_logits

    @property
    def _switches(self) -> set[str]:
        mask = self.spec.mask
        named = (("masked", not mask.is_full), ("listed", not mask.is_band), ("scales", self._scales))
        return {name for name, on in named if on}

    @property
    def _section_heads(self) -> int:
        """Heads that are worked on at the same time: many where some tiles take longer than others."""
        mask = self.spec.mask
        return 16 if mask.has_upper or not mask.is_band else 1

    def prepare(self, keys: _Keys) -> KernelPlan:
        """What the rows of queries subtract."""
        return self._kernel(
            "prepare",
            "backward_prepare.cu.j2",
            tile=keys.tile_q,
            threads=256,
            config_type="PrepareConfig",
            config=(
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", keys.tile_q),
                Constant("workspace_floats", 0),
                Constant("access_bytes", 16, "alignment of rows in global memory"),
            ),
            table=params.PREPARE_WIDE_SM90,
            switches={"row_stats", *(["scales"] if self._scales else [])},
        )

    def main(self, row: _Keys) -> KernelPlan:
        """dK and dV."""
        mask = self.spec.mask
        producer, consumer = row.registers
        return self._kernel(
            "main",
            "backward_keys_sm90.cu.j2",
            tile=ROWS,
            over="kv",
            threads=WARPGROUP * (_CONSUMERS + 1),
            config_type="BackwardKeysConfig",
            config=(
                Constant("head_dim", self.spec.head_dim),
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", row.tile_q, "B_r: query rows per step"),
                Constant("tile_kv", ROWS, "B_c: keys per tile that a block works on"),
                Constant("q_slots", row.q_slots, "tiles of Q under way at once"),
                Constant("do_slots", row.do_slots, "tiles of dO under way at once"),
                Constant("p_slots", row.p_slots, "tiles of P that wait for dS"),
                Constant("consumers", _CONSUMERS, "warpgroups that compute: one sums dV, one dK"),
                Constant("producer_registers", producer),
                Constant("consumer_registers", consumer),
                Constant("section_heads", self._section_heads, "heads that are worked on at the same time"),
                Constant(
                    "sums_first",
                    row.sums_first or not self._scales,
                    "a step's sum is issued before the next step",
                ),
                Constant("has_lower", mask.has_lower, "the mask ends on the left"),
                Constant("has_upper", mask.has_upper, "the mask ends on the right"),
            ),
            table=params.KEYS_SM90,
            smem=self._keys_smem(row),
            boxes=(
                Box("q", row.tile_q, PANEL),
                Box("k", ROWS, PANEL),
                Box("v", ROWS, PANEL),
                Box("dout", row.tile_q, PANEL),
                Box("row_stats", 1, row.tile_q, swizzle=0, element="fp32"),
            ),
            reasons=(row.reason,),
            switches=self._switches,
        )

    def query(self, row: _Query, stats_rows: int) -> KernelPlan:
        """dQ."""
        mask = self.spec.mask
        producer, consumer = row.registers
        tile_q = ROWS * _CONSUMERS
        return self._kernel(
            "query",
            "backward_query_sm90.cu.j2",
            tile=tile_q,
            threads=WARPGROUP * (_CONSUMERS + 1),
            config_type="BackwardQueryConfig",
            config=(
                Constant("head_dim", self.spec.head_dim),
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", tile_q, "B_r: query rows per tile that a block works on"),
                Constant("tile_kv", row.tile_kv, "B_c: keys per step"),
                Constant("k_slots", row.k_slots, "tiles of K under way at once"),
                Constant("v_slots", row.v_slots, "tiles of V under way at once"),
                Constant("stats_rows", stats_rows, "queries whose statistics lie together"),
                Constant("consumers", _CONSUMERS, "warpgroups that compute, 64 query rows each"),
                Constant("producer_registers", producer),
                Constant("consumer_registers", consumer),
                Constant("section_heads", self._section_heads, "heads that are worked on at the same time"),
                Constant("longest_first", self._section_heads > 1, "the last queries of a head go first"),
                Constant("has_lower", mask.has_lower, "the mask ends on the left"),
                Constant("has_upper", mask.has_upper, "the mask ends on the right"),
            ),
            table=params.QUERY_SM90 if mask.is_full else params.QUERY_SM90_MASKED,
            smem=self._query_smem(row),
            boxes=(
                Box("q", tile_q, PANEL),
                Box("k", row.tile_kv, PANEL),
                Box("v", row.tile_kv, PANEL),
                Box("dout", tile_q, PANEL),
            ),
            reasons=(row.reason,),
            switches=self._switches | (set() if mask.is_full else {"inspector"}),
        )

    def _kernel(
        self,
        role: Role,
        template: str,
        *,
        tile: int,
        over: str = "q",
        threads: int,
        config_type: str,
        config: tuple[Constant, ...],
        table: ParamTable,
        smem: SmemMap | None = None,
        boxes: tuple[Box, ...] = (),
        reasons: tuple[str, ...] = (),
        switches: set[str],
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
            params=table,
            smem=smem or SmemMap(),
            grid_tile=tile,
            grid_over="kv" if by_keys else "q",
            grid_heads="kv" if by_keys else "q",
            access_bytes=16,
            is_persistent=bool(boxes),
            boxes=boxes,
            divides_by_scale=bool(boxes) and self._scales,
            reasons=reasons,
            schedule=self.schedule,
            switches=frozenset(switches),
        )

    def _row_bytes(self) -> tuple[int, int]:
        """Of rows of Q or K, and of V or dO, in panels of 64 columns."""
        size = self.spec.element.bytes
        dim, dim_v = (-(-d // PANEL) * PANEL * size for d in (self.spec.head_dim, self.spec.head_dim_v))
        return dim, dim_v

    def _keys_smem(self, row: _Keys) -> SmemMap:
        dim, dim_v = self._row_bytes()
        q_slots, do_slots = f"{row.q_slots} slots", f"{row.do_slots} slots"
        layout = (
            SmemLayout()
            .then("k", ROWS * dim, "K_j")
            .then("v", ROWS * dim_v, "V_j")
            .then("q", row.q_slots * row.tile_q * dim, f"Q_i, {q_slots}")
            .then("do", row.do_slots * row.tile_q * dim_v, f"dO_i, {do_slots}")
            .then("p", row.p_slots * ROWS * row.tile_q * 4, f"P_ij for the other consumer, {row.p_slots} slots")
            .then("lse", row.q_slots * row.tile_q * 4, f"what rows subtract from their logits, {q_slots}")
            .then("dsum", row.do_slots * row.tile_q * 4, f"-D_i, {do_slots}")
            .then("k_barriers", 16, "for each slot: it is full, it is empty")
            .then("v_barriers", 16)
            .then("q_barriers", 16 * row.q_slots)
            .then("do_barriers", 16 * row.do_slots)
            .then("p_barriers", 16 * row.p_slots)
            .then("tile_barriers", 16 * _TILE_SLOTS)
            .then("tiles", 16 * _TILE_SLOTS, "which tiles of keys come next")
        )
        if not self.spec.mask.is_band:
            layout.then("listed_queries", 16 * row.q_slots, "which tiles of queries the slots hold")
        return layout.map()

    def _query_smem(self, row: _Query) -> SmemMap:
        dim, dim_v = self._row_bytes()
        tile_q = ROWS * _CONSUMERS
        layout = (
            SmemLayout()
            .then("q", tile_q * dim, "Q_i")
            .then("do", tile_q * dim_v, "dO_i")
            .then("k", row.k_slots * row.tile_kv * dim, f"K_j, {row.k_slots} slots")
            .then("v", row.v_slots * row.tile_kv * dim_v, f"V_j, {row.v_slots} slots")
            .then("stats", 2 * tile_q * 4, "of each consumer what its rows subtract from their logits, and -D_i")
            .then("q_barriers", 16, "for each slot: it is full, it is empty")
            .then("do_barriers", 16)
            .then("k_barriers", 16 * row.k_slots)
            .then("v_barriers", 16 * row.v_slots)
            .then("tile_barriers", 16 * _TILE_SLOTS)
            .then("tiles", 32 * _TILE_SLOTS, "which tiles of queries come next")
        )
        if not self.spec.mask.is_band:
            layout.then("listed_keys", 12 * row.k_slots, "which tiles of keys the slots hold")
        if not self.spec.mask.is_full:
            layout.then("scores_taken", 8 * row.k_slots, "all have their scores of K_j")
            layout.then("looked_through", 8 * row.k_slots, "K_j has no bad values any more")
            layout.then("written", 8 * _TILE_SLOTS, "results of a tile of queries are where they belong")
        return layout.map()
