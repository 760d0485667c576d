"""The tiles of a kernel, their resources and the reasons, as text and as plain values."""

from __future__ import annotations

from typing import Any

from flashgen.plan.model.plans import KernelPlan

#: Config members for tile sizes.
_SIZES = ("tile_q", "tile_kv", "stages", "warps")


def choice_lines(kernel: KernelPlan) -> tuple[str, ...]:
    """Lines for ``flashgen explain``."""
    kept = f"{kernel.grid_tile} {'keys' if kernel.grid_over == 'kv' else 'queries'} of a block"
    if kernel.choice is not None:
        first, *others = kernel.choice.lines()
        return (f"{kept}, {first}", *others)
    sizes = ", ".join(f"{name} {value}" for name, value in _sizes(kernel).items())
    because = (f"because: {reason}" for reason in kernel.reasons)
    limit = kernel.arch.max_smem_per_block
    return f"{kept}: {sizes}", f"shared memory: {kernel.smem.bytes} of {limit} bytes: {kernel.smem.sizes}", *because


def choice_plain(kernel: KernelPlan) -> dict[str, Any]:
    """The same as plain values."""
    plain: dict[str, Any] = {"role": kernel.role, **_sizes(kernel), "threads": kernel.threads}
    plain |= {"smem": {region.name: region.bytes for region in kernel.smem.regions}, "reasons": list(kernel.reasons)}
    plain["max_smem"] = kernel.arch.max_smem_per_block
    return plain | ({} if kernel.choice is None else kernel.choice.as_dict())


def _sizes(kernel: KernelPlan) -> dict[str, int]:
    sizes = {c.name: int(c.value) for c in kernel.config}
    if kernel.stages is not None:
        sizes["stages"] = kernel.stages
    return {name: sizes[name] for name in _SIZES if name in sizes}
