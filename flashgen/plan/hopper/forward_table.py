"""The schedule table of the forward kernel for Hopper.

``TABLE`` has a row, with its reason, for each pair of head dims. The other tables replace a row, or its ``tile_kv``,
for masks and scores that need registers. Measurements are in TFLOP/s on an H200 unless a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flashgen.plan.hopper.units import ROWS


class TileKv(NamedTuple):
    """Keys of a tile, by the kind of mask."""

    band: int
    block_sparse: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the schedule table."""

    #: Consumer warpgroups; each owns 64 query rows.
    consumers: int
    tile_kv: int
    #: Slots for V, and for K without the extra ones.
    stages: int
    #: Slots for Q beyond those of one tile.
    extra_q_slots: int
    #: Slots for K beyond ``stages``.
    extra_k_slots: int = 0
    #: O has its own shared memory and is stored by TMA.
    o_tile: bool
    #: P has registers of its own, so S can be used again. With ``values_first`` these are the registers of the
    #: previous P.
    keeps_scores: bool
    #: ``tile_kv`` if the score loads an element for every pair: its address and value take registers.
    tile_kv_pair_loads: TileKv
    #: ``tile_kv`` if all such elements are prefetched before the products.
    tile_kv_prefetched: TileKv
    #: ``tile_kv`` without a mask if the score only adds one prefetched 16-bit element.
    tile_kv_16bit_bias: int | None = None
    #: Registers per thread of producer and consumers, if not the usual ones.
    registers: tuple[int, int] | None = None
    #: Each consumer's rows of Q have a slot of their own.
    q_slot_per_consumer: bool = False
    #: The last P V of a tile of queries is issued alone, before the next tile's first scores.
    ends_alone: bool = False
    #: Each slot of V has its own record of non-finite values. A tile can then be scrubbed before results of the
    #: previous one are marked.
    records_per_slot: bool = True
    #: A mask that loads an element for each pair does so for 16 keys at a time, which takes fewer registers.
    mask_loads_in_groups: bool = False
    reason: str

    @property
    def values_first(self) -> bool:
        """Whether P V of a step is complete before the next exponentials, rather than overlapping them."""
        # With three consumers the two other warpgroups keep the tensor cores busy.
        return self.consumers == 3

    @property
    def q_rows(self) -> int:
        """Query rows in a slot."""
        return ROWS if self.q_slot_per_consumer else self.tile_q

    @property
    def q_slots(self) -> int:
        """Slots for Q."""
        return (self.consumers if self.q_slot_per_consumer else 1) + self.extra_q_slots

    @property
    def k_slots(self) -> int:
        """Slots for K."""
        return self.stages + self.extra_k_slots

    @property
    def tile_q(self) -> int:
        """Query rows of a block."""
        return ROWS * self.consumers

    @property
    def prefetches_next_k(self) -> bool:
        """Whether the next tile's first keys are loaded before the last values of the tile before."""
        # With more stages both are loaded early anyway. With ends_alone the values are needed first.
        return self.stages == 2 and not self.ends_alone

    def register_split(self) -> tuple[int, int]:
        """Registers per thread of producer and consumers."""
        return self.registers or ((40, 232) if self.consumers == 2 else (32, 160))


#: A row for each pair of head dims.
TABLE = {
    (64, 64): Row(
        consumers=3,
        tile_kv=128,
        stages=4,
        extra_q_slots=1,
        o_tile=True,
        keeps_scores=True,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=48),
        tile_kv_prefetched=TileKv(band=80, block_sparse=48),
        tile_kv_16bit_bias=96,
        reason="three warpgroups, as exponentials and not products set the pace at this width",
    ),
    (96, 96): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        extra_q_slots=1,
        o_tile=True,
        keeps_scores=True,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=80),
        tile_kv_prefetched=TileKv(band=112, block_sparse=112),
        reason="rows of 96 columns take the room of 128",
    ),
    (128, 128): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        extra_q_slots=1,
        o_tile=True,
        keeps_scores=True,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=80),
        tile_kv_prefetched=TileKv(band=112, block_sparse=80),
        reason="the widest tile of keys that leaves room for two tiles of Q and one of O",
    ),
    (192, 128): Row(
        consumers=2,
        tile_kv=112,
        stages=2,
        extra_q_slots=0,
        o_tile=True,
        keeps_scores=True,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=80),
        tile_kv_prefetched=TileKv(band=80, block_sparse=80),
        reason="the widest tile of keys that leaves room for O",
    ),
    (192, 192): Row(
        consumers=2,
        tile_kv=112,
        stages=2,
        extra_q_slots=0,
        o_tile=False,
        keeps_scores=False,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=48),
        tile_kv_prefetched=TileKv(band=64, block_sparse=48),
        reason="the widest tile of keys; O leaves from registers",
    ),
    # A third K slot uses the shared memory that is left. K_j stays in its slot until its scores need no recompute. With
    # two slots, K_(j+2) therefore arrived no earlier than V_(j+1). Causal, two runs, at S = 512, 1k, 2k, 4k, 8k, 16k:
    #   three slots: 344 454 553 618 648 708   and   338 457 564 625 675 697
    #   two slots:   332 452 543 617 645 692   and   336 449 550 612 643 694
    # Without a mask it makes no difference.
    (256, 256): Row(
        consumers=2,
        tile_kv=64,
        stages=2,
        extra_q_slots=0,
        extra_k_slots=1,
        o_tile=False,
        keeps_scores=False,
        tile_kv_pair_loads=TileKv(band=48, block_sparse=48),
        tile_kv_prefetched=TileKv(band=48, block_sparse=48),
        reason="two tiles of values and three of keys under way; O leaves from registers",
    ),
}

#: Rows for specs without a mask. At S = 512, 1k, 4k, 16k this row reaches 525, 607, 699, 721; TABLE's reaches 488, 579,
#: 687, 720. With a causal mask TABLE's is better: 321, 429, 605, 675, and this one 318, 428, 589, 663.
NO_MASK = {
    (256, 256): replace(
        TABLE[256, 256],
        q_slot_per_consumer=True,
        ends_alone=True,
        reason="two tiles of values and three of keys; last values are multiplied while the next queries come",
    ),
}

#: Rows for masks that compare captured integers along the sequence, as document masks do.
DOCUMENTS = {
    (64, 64): Row(
        consumers=2,
        tile_kv=128,
        stages=3,
        extra_q_slots=1,
        o_tile=True,
        keeps_scores=True,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=64),
        tile_kv_prefetched=TileKv(band=112, block_sparse=96),
        reason="smaller tiles of queries, as documents cut most tiles, and scores kept, which they leave room for",
    ),
}

#: ``tile_kv`` with a softcap. At head_dim 256 it is larger than without one, because exponentials need not keep K_j:
#: at 8k without a mask, 80 keys reach 700 to 713, and 64 reach 654.
SOFTCAP_TILE_KV = {(256, 256): 80}
#: ``tile_kv`` if the cap may have any value. tanh is then also computed exactly, beside the polynomial, which takes
#: registers. At head_dim 192 without a mask, 8k, a low cap reaches 628 with 112 keys, and 600 with 96.
ANY_SOFTCAP_TILE_KV = {**SOFTCAP_TILE_KV, (192, 192): 96}

#: ``tile_kv`` if the mask is evaluated pair by pair: with up to FEW_MASK_OPS operations, and with more.
MASK_OPS_TILE_KV = {
    (64, 64): (96, 64),
    (96, 96): (96, 96),
    (128, 128): (96, 80),
    (192, 128): (96, 80),
    (192, 192): (96, 112),
}
FEW_MASK_OPS = 6
#: ``tile_kv`` of the fallback, if the assembler runs out of registers. With fewer keys the portable kernel is as fast,
#: except for block patterns (MASK_LOADS), where it takes 2 to 4 times as long.
FALLBACK_TILE_KV = {**dict.fromkeys(TABLE, 64), (256, 256): 48}

#: Rows for masks that load an element for each pair, as block patterns do. The producer also loads one for each tile,
#: which takes registers. Most patterns have blocks of 64 keys, which never cut a tile of 64 or 32 keys.
#: On an H200, 3 of 10 blocks allowed, causal, 8k, at head_dim 64, 96, 128: 997, 1004, 776 us; 80 keys take 1964, 1599,
#: 1264 us. On an H100 with a bias: 1269, 940, 822 us; 48 keys take 2315, 1611, 1267 us. At head_dim 192 with a bias, 64
#: keys lack registers: 32 keys take 788 us, and 48 take 934. At 256 without one, 32 keys take 525 us, and 48 take 644.
MASK_LOADS = {
    (64, 64): Row(
        consumers=2,
        tile_kv=64,
        stages=3,
        extra_q_slots=1,
        o_tile=True,
        keeps_scores=True,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=64),
        tile_kv_prefetched=TileKv(band=64, block_sparse=64),
        registers=(88, 208),
        reason="smaller tiles of queries and keys, as what a mask looks up for each pair takes registers",
    ),
    **{
        dims: replace(
            TABLE[dims],
            tile_kv=tile_kv,
            tile_kv_pair_loads=TileKv(with_bias, with_bias),
            stages=stages,
            registers=registers,
            mask_loads_in_groups=in_groups,
            reason="smaller tiles of keys, as what a mask looks up for each pair takes registers",
        )
        for dims, tile_kv, with_bias, stages, registers, in_groups in (
            ((96, 96), 64, 64, 2, (88, 208), False),
            ((128, 128), 64, 64, 2, (88, 208), True),
            ((192, 128), 64, 32, 2, (88, 208), True),
            ((192, 192), 64, 32, 2, (88, 208), True),
            ((256, 256), 32, 32, 4, (80, 208), False),
        )
    },
}
