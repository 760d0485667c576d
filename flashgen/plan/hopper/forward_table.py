"""The schedule table of the forward kernel for Hopper: a row with its reason for each pair of head dims, and smaller
tiles for masks and scores that need registers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.plan.hopper.units import ROWS


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the schedule table."""

    consumers: int
    tile_kv: int
    stages: int
    #: Slots for queries beyond those of one tile.
    q_ahead: int
    #: Whether O has its own shared memory and is written by TMA.
    o_tile: bool
    #: Whether exponentials have registers of their own, so that the scores can be used again. They are those of the
    #: exponentials before where values come first.
    keeps_scores: bool
    #: Tiles of keys where the score reads an element for every pair, whose addresses and values take registers: of
    #: masks that are bands, and of others; and where all such elements are fetched before the products.
    tile_kv_reading: tuple[int, int]
    tile_kv_ahead: tuple[int, int]
    reason: str
    #: The last of these, where there is no mask, and one load of two bytes for each pair is all that is added.
    tile_kv_few: int | None = None
    registers: tuple[int, int] | None = None
    #: Whether each consumer's queries have a slot of their own.
    q_by_consumer: bool = False
    #: Whether the last P V of a tile of queries is issued alone, before the next tile's first scores.
    ends_alone: bool = False
    #: Slots for keys beyond those of the stages.
    k_ahead: int = 0
    #: Whether each slot of V has its own record of non-finite values. A tile can then be scrubbed before results of
    #: the previous one are marked.
    notes_each: bool = True
    #: Whether a mask that looks something up for each pair does so for 16 keys at a time, with fewer registers.
    looks_up_in_groups: bool = False

    @property
    def values_first(self) -> bool:
        """Whether a step's values are multiplied before the next exponentials are taken, and not beside them."""
        # Two other warpgroups have products meanwhile, and exponentials are rounded as they come.
        return self.consumers == 3

    @property
    def q_rows(self) -> int:
        """Queries in a slot."""
        return ROWS if self.q_by_consumer else self.tile_q

    @property
    def q_slots(self) -> int:
        """Slots for queries."""
        return (self.consumers if self.q_by_consumer else 1) + self.q_ahead

    @property
    def k_slots(self) -> int:
        """Slots for keys."""
        return self.stages + self.k_ahead

    @property
    def tile_q(self) -> int:
        """Queries of a block."""
        return ROWS * self.consumers

    @property
    def keys_lead(self) -> bool:
        """Whether the next tile's first keys come before the last values: with more stages both come early as it is."""
        # Values whose product is issued alone are needed first.
        return self.stages == 2 and not self.ends_alone

    def split(self) -> tuple[int, int]:
        """Registers per thread of producers and consumers."""
        return self.registers or ((40, 232) if self.consumers == 2 else (32, 160))


#: A row for each pair of head dims.
TABLE = {
    (64, 64): Row(
        3,
        128,
        4,
        1,
        True,
        True,
        (64, 48),
        (80, 48),
        "three warpgroups, as exponentials and not products set the pace at this width",
        tile_kv_few=96,
    ),
    (96, 96): Row(2, 128, 2, 1, True, True, (80, 80), (112, 112), "rows of 96 columns take the room of 128"),
    (128, 128): Row(
        2,
        128,
        2,
        1,
        True,
        True,
        (80, 80),
        (112, 80),
        "the widest tile of keys that leaves room for two tiles of Q and one of O",
    ),
    (192, 128): Row(2, 112, 2, 0, True, True, (80, 80), (80, 80), "the widest tile of keys that leaves room for O"),
    (192, 192): Row(2, 112, 2, 0, False, False, (64, 48), (64, 48), "the widest tile of keys; O leaves from registers"),
    # The third slot for keys takes the room that is left. Exponentials hold K_j until no score of it is needed again,
    # and with two slots K_(j+2) came together with V_(j+1). With a causal mask, S = 512, 1k, 2k, 4k, 8k, 16k, in two
    # runs on an H200: 344, 454, 553, 618, 648, 708 TFLOP/s beside 332, 452, 543, 617, 645, 692 with two slots, and 338,
    # 457, 564, 625, 675, 697 beside 336, 449, 550, 612, 643, 694. Without a mask it makes no difference.
    (256, 256): Row(
        2,
        64,
        2,
        0,
        False,
        False,
        (48, 48),
        (48, 48),
        "two tiles of values and three of keys under way; O leaves from registers",
        k_ahead=1,
    ),
}

#: Rows for specs without a mask. At S = 512, 1k, 4k, 16k this one reaches 525, 607, 699, 721 TFLOP/s on an H200 where
#: the other has 488, 579, 687, 720. With a causal mask it is the other way round: 318, 428, 589, 663 and 321, 429, 605,
#: 675.
UNCUT = {
    (256, 256): replace(
        TABLE[256, 256],
        q_by_consumer=True,
        ends_alone=True,
        reason="two tiles of values and three of keys; last values are multiplied while the next queries come",
    ),
}

#: Rows for masks that compare captured whole numbers along the sequence, as documents do.
DOCUMENTS = {
    (64, 64): Row(
        2,
        128,
        3,
        1,
        True,
        True,
        (80, 64),
        (112, 96),
        "smaller tiles of queries, as documents cut most tiles, and scores kept, which they leave room for",
    ),
}

#: Keys of a tile with a softcap. At head_dim 256 they are more than without one, where exponentials hold them longer:
#: without a mask 700 to 713 TFLOP/s at 8k on an H200 where 64 have 654.
CAPPED_KV = {(256, 256): 80}
#: And where the cap may be any, as many as leave registers for a second way in which tangents are computed beside the
#: polynomial: at head_dim 192 without a mask 96 had 600 TFLOP/s at 8k where 112 have 628.
ANY_CAP_KV = {**CAPPED_KV, (192, 192): 96}

#: Keys of a tile where the mask tests single pairs: with few operations, and with more.
ASKED_KV = {
    **{(64, 64): (96, 64), (96, 96): (96, 96), (128, 128): (96, 80)},
    **{(192, 128): (96, 80), (192, 192): (96, 112)},
}
FEW_ASKED = 6
#: As few as are worth planning where all else has turned out to need more registers than there are: with fewer the
#: kernel for all GPUs is as good, but for patterns of blocks, of which it takes 2 to 4 times as long (LOOKED_UP).
LEAST_KV = {**dict.fromkeys(TABLE, 64), (256, 256): 48}

#: Rows for masks that look something up for each pair, as patterns of blocks do: also for whole tiles, which takes
#: a producer registers. Most patterns have blocks of 64 keys, and cut no tile of 64 or 32: with 3 of 10 blocks allowed,
#: causal, 8k, an H200 takes 997, 1004 and 776 us at head_dim 64, 96 and 128 where 80 keys take 1964, 1599 and 1264. On
#: an H100 a bias besides takes 1269, 940 and 822 us where 48 keys take 2315, 1611 and 1267; at 192, where 64 keys have
#: too few registers for it, 788 us with 32 keys and 934 with 48; and 256 without one takes 525 us with 32 keys, and 644
#: with 48.
LOOKED_UP = {
    (64, 64): Row(
        2,
        64,
        3,
        1,
        True,
        True,
        (64, 64),
        (64, 64),
        "smaller tiles of queries and keys, as what a mask looks up for each pair takes registers",
        registers=(88, 208),
    ),
    **{
        dims: replace(
            TABLE[dims],
            tile_kv=tile_kv,
            tile_kv_reading=(reading, reading),
            stages=stages,
            registers=registers,
            looks_up_in_groups=in_groups,
            reason="smaller tiles of keys, as what a mask looks up for each pair takes registers",
        )
        for dims, tile_kv, reading, stages, registers, in_groups in (
            ((96, 96), 64, 64, 2, (88, 208), False),
            ((128, 128), 64, 64, 2, (88, 208), True),
            ((192, 128), 64, 32, 2, (88, 208), True),
            ((192, 192), 64, 32, 2, (88, 208), True),
            ((256, 256), 32, 32, 4, (80, 208), False),
        )
    },
}
