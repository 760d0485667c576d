"""How many blocks of a kernel share a multiprocessor: the arithmetic of NVIDIA's occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.compile.binary import Resources
from flashgen.plan.model.plans import KernelPlan

_WARP = 32
_REGISTERS_PER_ALLOCATION = 256
#: A multiprocessor's registers are four banks; a warp's lie in one of them.
_BANKS = 4
_SMEM_GRANULE = {7: 256}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks per multiprocessor, and what keeps it from being more."""

    blocks: int
    #: ``registers``, ``shared memory``, ``threads`` or ``blocks``.
    limited_by: str
    #: Share of the warps that a multiprocessor can hold, 0 to 1.
    fraction: float


def occupancy(plan: KernelPlan, resources: Resources) -> Occupancy:
    """The occupancy of a kernel on its architecture."""
    arch = plan.arch
    warps = -(-plan.threads // _WARP)
    limits = {
        "shared memory": _smem_limit(arch, plan.smem.bytes + resources.static_smem_bytes),
        "registers": _register_limit(arch, resources.registers, warps),
        "threads": arch.max_threads_per_multiprocessor // (warps * _WARP),
        "blocks": arch.max_blocks_per_multiprocessor,
    }
    limited_by = min(limits, key=lambda name: limits[name])
    blocks = limits[limited_by]
    return Occupancy(blocks, limited_by, blocks * warps * _WARP / arch.max_threads_per_multiprocessor)


def blocks_per_multiprocessor(plan: KernelPlan, resources: Resources) -> int:
    """How many blocks of a kernel are resident on one multiprocessor at a time."""
    return occupancy(plan, resources).blocks


def _register_limit(arch: Arch, registers: int, warps: int) -> int:
    per_warp = _round_up(max(registers, 1) * _WARP, _REGISTERS_PER_ALLOCATION)
    warps_held = arch.registers_per_multiprocessor // _BANKS // per_warp * _BANKS
    return warps_held // warps


def _smem_limit(arch: Arch, bytes_: int) -> int:
    # What the driver keeps for itself is what no block may ask for: 1 KiB, and nothing before sm_80.
    reserved = min(arch.reserved_smem_per_block, arch.smem_per_multiprocessor - arch.max_smem_per_block)
    taken = _round_up(bytes_ + reserved, _SMEM_GRANULE.get(arch.major, 128))
    return arch.smem_per_multiprocessor // taken if taken else arch.max_blocks_per_multiprocessor


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
