"""Units of Hopper's instructions, and which specs its kernels support."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.spec import AttentionSpec, Schedule

#: Rows of a warpgroup's product, and its threads.
ROWS = 64
WARPGROUP = 128
#: Bytes of a row of a panel, which is one swizzled row of shared memory, and its columns of 16-bit numbers.
PANEL_BYTES = 128
PANEL = 64
#: Bytes that TMA aligns rows to.
_CHUNK_BYTES = 16
#: Columns that one step of a product sums over, for 16 bits, and bytes.
STEP = 16
STEP_BYTES = 32
#: Rows that one warp stores by TMA.
STORED_ROWS = 16
#: Slots of the ring that announces a persistent block's tiles: of the backward, and of the forward kernel.
TILE_SLOTS = 2
TILE_STAGES = 4
#: Registers of a multiprocessor.
_REGISTERS = 65536


def why_not_hopper(
    spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int, *, takes_cache: bool = False
) -> str | None:
    """Why neither pass can use the kernels for Hopper, as a clause; None if they can.

    ``takes_cache``: the question is about a kernel for a cache.
    """
    if schedule.algorithm not in (None, "fa3"):
        return f"its schedule says algorithm={schedule.algorithm!r}"
    if not arch.has_wgmma:
        return f"it needs sm_90a, and this is {arch.name}"
    if not (spec.element.is_half or spec.element.is_eight_bit):
        return f"its tensor-core instructions take fp16, bf16 and e4m3, and dtype is {spec.dtype!r}"
    if spec.cache and not takes_cache:
        return "it takes no cache of keys and values"
    chunk = _CHUNK_BYTES // spec.cache_element.bytes
    if spec.head_dim % chunk or spec.head_dim_v % chunk:
        return f"TMA needs rows of a multiple of {_CHUNK_BYTES} bytes, so head dims must be multiples of {chunk}"
    if access_bytes != 16:
        return "TMA needs tensors aligned to 16 bytes"
    return None


def registers_at_launch(warpgroups: int) -> int:
    """Registers per thread at launch; setmaxnreg redistributes them later."""
    return _REGISTERS // (WARPGROUP * warpgroups) // 8 * 8


def is_block_sparse(spec: AttentionSpec) -> bool:
    """Whether the mask is more than a band. The producer then announces each tile to the consumers."""
    return not spec.mask.is_band


def row_bytes(spec: AttentionSpec) -> tuple[int, int]:
    """Bytes of a row in shared memory: of Q and K, and of V, O and dO. Rows are whole panels."""
    return panel_bytes(spec.head_dim, spec.element.bytes), panel_bytes(spec.head_dim_v, spec.element.bytes)


def panel_bytes(columns: int, element_bytes: int) -> int:
    """Bytes of a row of so many columns, in whole panels."""
    return -(-columns * element_bytes // PANEL_BYTES) * PANEL_BYTES
