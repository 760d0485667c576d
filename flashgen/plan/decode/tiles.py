"""The tiles of the decode kernel: warps, stages, and the shared memory they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.plan.model.plans import SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec

#: Rows of a tile for each warp: those of one product by tensor cores.
ROWS = 16
#: Keys of a tile for each warp: a slice. Each has a fixed cost, such as addresses and votes.
_KEYS = 16
#: Those of an 8-bit cache, if 16 keys and their values have fewer bytes than this: it is faster up to 128 columns.
_MANY_KEYS, _FEW_BYTES = 32, 5 * 1024
#: Bytes that a block has under way at least. An H200 delivers about 36 bytes per nanosecond to each multiprocessor,
#: after about 800 ns: 28 KiB, for which two blocks have room to spare.
_UNDER_WAY = 24 * 1024
_MAX_STAGES = 5
_STEP = 16
#: The same for 8-bit keys and values, whose rows are pairs of 16-byte chunks in shared memory.
_EIGHT_BIT_STEP = 32
#: With wider heads no registers are left for Q beside O.
_WIDEST_HELD = 192
#: Warps of a block and blocks of a multiprocessor, the best first. A step of narrow heads has few bytes, and takes
#: nearly as long as one of wide heads: more warps hide that.
_CANDIDATES = ((4, 3), (4, 2), (2, 2), (4, 1), (2, 1))
#: Registers of Q and O with which three blocks share a multiprocessor.
_FEW_REGISTERS = 64
#: The same for an 8-bit cache. Its steps have half the bytes, so more warps must hide their latency.
_FEW_REGISTERS_EIGHT_BITS = 96
_RESULT_BYTES = 4
#: Of an element of Q where tensor cores read it.
_OPERAND_BYTES = 2
#: Of a key in pages: its page, and its row there.
_LOCATION_BYTES = 8
#: Per row of a tile: a reference maximum and a sum, of a warp and of the block.
_ROW_BYTES = 16
#: The scheduler's state.
_SCHEDULER_BYTES = 192


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Warps, stages, and how many blocks share a multiprocessor."""

    warps: int
    slice_keys: int
    stages: int
    blocks: int
    reason: str

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.warps

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return self.slice_keys * self.warps


def tiles_of(spec: AttentionSpec, arch: Arch) -> DecodeTiles | None:
    """The first candidate that fits with enough copies under way; None if none does."""
    return next(_fitting(spec, arch), None)


def smem_of(spec: AttentionSpec, tiles: DecodeTiles) -> SmemMap:
    """The shared-memory map."""
    size, (dim, dim_v) = spec.cache_element.bytes, padded_dims(spec)
    keys = tiles.stages * tiles.keys
    ring = f", {tiles.stages} stages of {tiles.slice_keys} keys for each warp"
    layout = SmemLayout()
    layout.then("q", _query_bytes(spec, tiles.warps), "Q, a copy of its rows for each warp")
    layout.then("k", keys * dim * size, f"K_j{ring}")
    layout.then("v", keys * dim_v * size, f"V_j{ring}")
    if spec.page_scales:
        layout.then("scales", tiles.stages * _scale_bytes(spec, tiles.keys), f"scales of these keys and values{ring}")
    exchanged = max(tiles.rows * _ROW_BYTES, tiles.stages * _location_bytes(spec, tiles.keys))
    layout.then("shared", _SCHEDULER_BYTES + exchanged, "what the threads exchange")
    layout.over("merge", tiles.rows * dim_v * _RESULT_BYTES, "O of each warp, once the loop is over")
    return layout.map()


def _fitting(spec: AttentionSpec, arch: Arch) -> Iterator[DecodeTiles]:
    few = _FEW_REGISTERS if spec.cache_dtype is None else _FEW_REGISTERS_EIGHT_BITS
    for warps, blocks in _CANDIDATES:
        if blocks > 2 and _held_registers(spec) > few:
            continue
        room = min(arch.max_smem_per_block, arch.smem_per_multiprocessor // blocks - arch.reserved_smem_per_block)
        room -= _SCHEDULER_BYTES + _query_bytes(spec, warps)
        for slice_keys in _slices(spec):
            keys = warps * slice_keys
            stage = keys * _key_bytes(spec)
            each = stage + _scale_bytes(spec, keys)
            # Locations of keys during the loop and totals of rows after it share memory.
            stages = min(
                _MAX_STAGES,
                (room - ROWS * warps * _ROW_BYTES) // each,
                room // (each + _location_bytes(spec, keys)),
            )
            under_way = (stages - 1) * stage
            if stages == _MAX_STAGES or (stages >= 2 and under_way >= _UNDER_WAY):
                reason = _reason(warps, slice_keys, stages, blocks, under_way)
                yield DecodeTiles(warps, slice_keys, stages, blocks, reason)


def _slices(spec: AttentionSpec) -> tuple[int, ...]:
    """Keys of a slice, the best first."""
    has_few_bytes = spec.cache_dtype is not None and _KEYS * _key_bytes(spec) < _FEW_BYTES
    return (_MANY_KEYS, _KEYS) if has_few_bytes else (_KEYS,)


def _key_bytes(spec: AttentionSpec) -> int:
    """Bytes of a key and its value."""
    return sum(padded_dims(spec)) * spec.cache_element.bytes


def _reason(warps: int, slice_keys: int, stages: int, blocks: int, under_way: int) -> str:
    number = {3: "three", 2: "two"}.get(blocks)
    shared = f"{number} blocks share a multiprocessor" if number else "one block has a multiprocessor to itself"
    return (
        f"{warps} warps with {slice_keys} keys each and {stages} stages keep {under_way // 1024} KiB of keys and "
        f"values under way in each block, and {shared}"
    )


def holds_queries(spec: AttentionSpec) -> bool:
    """Whether registers hold Q."""
    return spec.head_dim <= _WIDEST_HELD


def _held_registers(spec: AttentionSpec) -> int:
    """Registers of a thread for Q and O."""
    dim, dim_v = padded_dims(spec)
    return ROWS * (dim // 2 + dim_v) // 32


def _query_bytes(spec: AttentionSpec, warps: int) -> int:
    return 0 if holds_queries(spec) else warps * ROWS * padded_dims(spec)[0] * _OPERAND_BYTES


def _scale_bytes(spec: AttentionSpec, keys: int) -> int:
    """Bytes of a stage for the scales of pages, one of each key and each value."""
    return keys * 2 * _RESULT_BYTES if spec.page_scales else 0


def _location_bytes(spec: AttentionSpec, keys: int) -> int:
    """Bytes of a stage that say where keys lie in pages."""
    return keys * _LOCATION_BYTES if spec.cache == "paged" else 0


def padded_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Head dims, rounded up to whole steps of the tensor cores."""
    step = _STEP if spec.cache_dtype is None else _EIGHT_BIT_STEP
    dim, dim_v = (-(-d // step) * step for d in (spec.head_dim, spec.head_dim_v))
    return dim, dim_v
