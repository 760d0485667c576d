"""What the backward kernels for Hopper share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from flashgen.arch import Arch
from flashgen.plan.hopper.backward_tiles import CONSUMERS, padded
from flashgen.plan.hopper.units import PANEL, WARPGROUP, is_block_sparse
from flashgen.plan.model import params
from flashgen.plan.model.budget import Choice
from flashgen.plan.model.failed_tiles import FailedTiles
from flashgen.plan.model.plans import Box, Constant, KernelPlan, ParamTable, Role
from flashgen.plan.model.sum_ring import SumRing
from flashgen.plan.portable.backward_frame import BackwardFrame
from flashgen.spec import AttentionSpec, Schedule

#: Threads of a block of the repair kernel, and flags that it looks at.
_REPAIR_THREADS, _REPAIR_FLAGS = 256, 32


class BackwardSm90(BackwardFrame):
    """The backward pass of a kernel for Hopper."""

    __slots__ = ()

    @classmethod
    def of(cls, spec: AttentionSpec, schedule: Schedule | None, arch: Arch) -> BackwardSm90:
        """That of a spec."""
        return cls(spec, arch, schedule, "FlashAttention-3", 16)

    @property
    def padded(self) -> AttentionSpec:
        """The spec with the head dims that tiles in shared memory and registers have."""
        return padded(self.spec)

    @property
    def scales(self) -> bool:
        """Whether logits are only scaled products, so that L can be subtracted before the scale."""
        return self.spec.score is None or not self.spec.score.changes_logits

    @property
    def switches(self) -> frozenset[str]:
        """The switches that describe the mask to the templates."""
        return frozenset({"block_sparse"} if is_block_sparse(self.spec) else ())

    def section_heads(self, in_order: bool = False) -> int:
        """Heads of a section, whose tiles are scheduled together: many if some tiles take longer than others.

        Also many if the tiles of a head add to dQ in a fixed order, so that few of them run at once.
        """
        mask = self.spec.mask
        return 16 if mask.has_upper or is_block_sparse(self.spec) or in_order else 1

    def constants(
        self, choice: Choice, *tiles: Constant, share: str, in_order: bool = False, own: tuple[Constant, ...] = ()
    ) -> tuple[Constant, ...]:
        """The config of a kernel of products; ``share`` says how consumers divide the work."""
        mask = self.spec.mask
        producer, consumer = choice.tiles.registers
        heads = self.section_heads(in_order)
        return (
            Constant("head_dim", self.padded.head_dim),
            Constant("head_dim_v", self.padded.head_dim_v),
            *tiles,
            Constant("consumers", CONSUMERS, f"warpgroups that compute{share}"),
            Constant("producer_registers", producer),
            Constant("consumer_registers", consumer),
            Constant("section_heads", heads, "heads of a section, whose tiles are scheduled together"),
            *own,
            Constant("has_lower", mask.has_lower, "the band has a lower bound on k - q"),
            Constant("has_upper", mask.has_upper, "the band has an upper bound on k - q"),
        )

    def products(
        self,
        role: Role,
        template: str,
        choice: Choice,
        *,
        tile_q: int,
        tile_kv: int,
        over: Literal["q", "kv"],
        config_type: str,
        config: tuple[Constant, ...],
        table: ParamTable,
        boxes: tuple[Box, ...] = (),
        switches: Collection[str] = (),
        sums: SumRing | None = None,
        failures: FailedTiles | None = None,
    ) -> KernelPlan:
        """A kernel with one producer warpgroup and two consumers."""
        return self.kernel(
            role,
            template,
            threads=WARPGROUP * (CONSUMERS + 1),
            tile=tile_q if over == "q" else tile_kv,
            over=over,
            config_type=config_type,
            config=config,
            params=table,
            smem=choice.budget.smem,
            boxes=(
                Box("q", tile_q, PANEL),
                Box("k", tile_kv, PANEL),
                Box("v", tile_kv, PANEL),
                Box("dout", tile_q, PANEL),
                *boxes,
            ),
            reasons=(choice.tiles.reason,),
            switches=self.switches | set(switches),
            divides_by_scale=self.scales,
            sums=sums,
            failures=failures,
            choice=choice,
            overlaps_predecessor=True,
        )

    def failures(self, tile_q: int, tile_kv: int) -> FailedTiles | None:
        """The flags of tiles of gradients. Without a mask every pair is allowed, and there is nothing to repair."""
        return None if self.spec.mask.is_full else FailedTiles(tile_q, tile_kv)

    def prepare(
        self,
        tile_q: int,
        how_summed: str,
        *,
        workspace: int = 0,
        sums: SumRing | None = None,
        failures: FailedTiles | None = None,
    ) -> KernelPlan:
        """The statistics L and D of the query rows. ``workspace``: floats of dQ per tile of queries.

        ``how_summed``: how dQ is summed, "ring", "ordered" or "registers".
        """
        return self.kernel(
            "prepare",
            "hopper/backward_prepare.cu.j2",
            threads=256,
            tile=tile_q,
            config_type="PrepareConfig",
            config=(
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", tile_q),
                Constant("workspace_floats", workspace, "of dQ, per tile of queries" if workspace else ""),
                Constant("access_bytes", 16, "alignment of rows in global memory"),
            ),
            params=params.PREPARE_SM90[how_summed, failures is not None],
            sums=sums,
            failures=failures,
        )

    def repair(self, kernels: Sequence[KernelPlan]) -> KernelPlan:
        """Computes tiles that a NaN or an infinity spoiled once more, pair by pair."""
        failures = kernels[-1].failures
        assert failures is not None, "a mask has flags"
        mask = self.spec.mask
        return self.kernel(
            "repair",
            "hopper/backward_repair.cu.j2",
            threads=_REPAIR_THREADS,
            tile=_REPAIR_FLAGS,
            over="flags",
            config_type="RepairConfig",
            config=(
                Constant("head_dim", self.spec.head_dim),
                Constant("head_dim_v", self.spec.head_dim_v),
                Constant("tile_q", failures.tile_q, "query rows per tile of dQ"),
                Constant("tile_kv", failures.tile_kv, "keys per tile of dK and dV"),
                Constant("warps", _REPAIR_THREADS // 32, "warps of a block, which divide the rows of a tile"),
                Constant("flags", _REPAIR_FLAGS, "flags that a block looks at"),
                Constant("has_lower", mask.has_lower, "the band has a lower bound on k - q"),
                Constant("has_upper", mask.has_upper, "the band has an upper bound on k - q"),
            ),
            params=params.REPAIR_SM90,
            switches=self.switches,
            failures=failures,
            overlaps_predecessor=True,
        )
