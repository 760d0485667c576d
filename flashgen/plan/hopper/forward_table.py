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
    #: Of K and of V.
    stages: int
    #: ``tile_kv`` if the score loads an element for every pair: its address and value take registers.
    tile_kv_pair_loads: TileKv
    #: ``tile_kv`` if all such elements are prefetched before the products.
    tile_kv_prefetched: TileKv
    #: ``tile_kv`` without a mask if the score only adds one prefetched 16-bit element.
    tile_kv_16bit_bias: int | None = None
    #: ``tile_kv`` for 8-bit inputs with a band mask, sequences of different lengths or a sink, which take registers.
    tile_kv_bounded: int | None = None
    #: Registers per thread of producer and consumers, if not the usual ones.
    registers: tuple[int, int] | None = None
    #: Of Q; 1 unless 2 fit.
    q_stages: int = 2
    #: O has its own shared memory and is stored by TMA; False unless it fits.
    stores_by_tma: bool = True
    reason: str

    @property
    def tile_q(self) -> int:
        """Query rows of a block."""
        return ROWS * self.consumers

    def register_split(self) -> tuple[int, int]:
        """Registers per thread of producer and consumers."""
        return self.registers or ((40, 232) if self.consumers == 2 else (32, 160))


#: A row for each pair of head dims.
TABLE = {
    (64, 64): Row(
        consumers=3,
        tile_kv=128,
        stages=4,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=48),
        tile_kv_prefetched=TileKv(band=80, block_sparse=48),
        tile_kv_16bit_bias=96,
        reason="three warpgroups, as exponentials and not products set the pace at this width",
    ),
    (96, 96): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=80),
        tile_kv_prefetched=TileKv(band=112, block_sparse=112),
        reason="rows of 96 columns take the room of 128",
    ),
    (128, 128): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=80),
        tile_kv_prefetched=TileKv(band=112, block_sparse=80),
        reason="the widest tile of keys that leaves room for two tiles of Q and one of O",
    ),
    (192, 128): Row(
        consumers=2,
        tile_kv=112,
        stages=2,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=80),
        tile_kv_prefetched=TileKv(band=80, block_sparse=80),
        reason="the widest tile of keys that leaves room for O",
    ),
    (192, 192): Row(
        consumers=2,
        tile_kv=96,
        stages=2,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=48),
        tile_kv_prefetched=TileKv(band=64, block_sparse=48),
        reason="the widest tile of keys whose P has registers twice; O leaves from registers",
    ),
    (256, 256): Row(
        consumers=2,
        tile_kv=64,
        stages=2,
        tile_kv_pair_loads=TileKv(band=48, block_sparse=48),
        tile_kv_prefetched=TileKv(band=48, block_sparse=48),
        reason="the widest tile of keys whose P has registers twice; O leaves from registers",
    ),
}

#: The rows for e4m3. Steps of products sum over 32 keys, so tiles of keys are multiples of 32. There is a copy of V,
#: transposed, and registers for the product of a block beside O.
EIGHT_BITS = {
    (64, 64): Row(
        consumers=2,
        tile_kv=128,
        stages=4,
        tile_kv_pair_loads=TileKv(band=96, block_sparse=64),
        tile_kv_prefetched=TileKv(band=96, block_sparse=64),
        registers=(40, 232),
        reason="the widest tile of keys",
    ),
    (96, 96): Row(
        consumers=2,
        tile_kv=128,
        stages=3,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=64),
        tile_kv_prefetched=TileKv(band=96, block_sparse=64),
        registers=(40, 232),
        reason="the widest tile of keys",
    ),
    (128, 128): Row(
        consumers=2,
        tile_kv=128,
        stages=3,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=64),
        tile_kv_prefetched=TileKv(band=64, block_sparse=64),
        tile_kv_bounded=96,
        registers=(40, 232),
        reason="the widest tile of keys, whose P has registers once, beside a product and O",
    ),
    (192, 128): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=64),
        tile_kv_prefetched=TileKv(band=64, block_sparse=64),
        tile_kv_bounded=96,
        registers=(40, 232),
        reason="the widest tile of keys, whose P has registers once, beside a product and O",
    ),
    (192, 192): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        tile_kv_pair_loads=TileKv(band=64, block_sparse=64),
        tile_kv_prefetched=TileKv(band=64, block_sparse=64),
        registers=(40, 232),
        reason="the widest tile of keys; O leaves from registers",
    ),
    (256, 256): Row(
        consumers=2,
        tile_kv=128,
        stages=2,
        tile_kv_pair_loads=TileKv(band=32, block_sparse=32),
        tile_kv_prefetched=TileKv(band=32, block_sparse=32),
        registers=(40, 232),
        reason="the widest tile of keys; O leaves from registers",
    ),
}

#: Rows for e4m3 without a score or blocks of scales, and with at most a band mask.
EIGHT_BITS_THREE_CONSUMERS = {
    (64, 64): Row(
        consumers=3,
        tile_kv=128,
        stages=4,
        tile_kv_pair_loads=TileKv(band=96, block_sparse=96),
        tile_kv_prefetched=TileKv(band=96, block_sparse=96),
        tile_kv_bounded=96,
        reason="three warpgroups hide each other's latency: without a mask, 576 TFLOP/s instead of 508 where each also "
        "overlaps its own steps",
    ),
}

#: Rows for masks that compare captured integers along the sequence, as document masks do, and for dropout and
#: sequences with lengths of their own, which take registers.
TWO_CONSUMERS = {
    (64, 64): Row(
        consumers=2,
        tile_kv=128,
        stages=3,
        tile_kv_pair_loads=TileKv(band=80, block_sparse=64),
        tile_kv_prefetched=TileKv(band=112, block_sparse=96),
        reason="smaller tiles of queries, as documents cut most tiles, and more registers for each thread",
    ),
}

#: ``tile_kv`` if the mask is evaluated pair by pair: with up to FEW_MASK_OPS operations, and with more.
MASK_OPS_TILE_KV = {
    (64, 64): (96, 64),
    (96, 96): (96, 96),
    (128, 128): (96, 80),
    (192, 128): (96, 80),
    (192, 192): (96, 80),
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
            reason="smaller tiles of keys, as what a mask looks up for each pair takes registers",
        )
        for dims, tile_kv, with_bias, stages, registers in (
            ((96, 96), 64, 64, 2, (88, 208)),
            ((128, 128), 64, 64, 2, (88, 208)),
            ((192, 128), 64, 32, 2, (88, 208)),
            ((192, 192), 64, 32, 2, (88, 208)),
            ((256, 256), 32, 32, 4, (80, 208)),
        )
    },
}
