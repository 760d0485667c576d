"""A built kernel as files: sources, cubins, and a manifest that says how to launch them from any language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashgen.common.version import __version__
from flashgen.launch.call.packing import COUNTER, field_offsets
from flashgen.launch.driver.counters import COUNTER_WORD_BYTES
from flashgen.launch.variant import Loadable
from flashgen.plan.model.plans import AttentionPlan, Box, KernelPlan, Role

SCHEMA = 1


def save(plan: AttentionPlan, kernels: Mapping[Role, Loadable], directory: Path) -> Path:
    """Writes every kernel's source and cubin and the manifest, which comes last, into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for kernel in kernels.values():
        (directory / f"{kernel.plan.name}.cu").write_text(kernel.source.text, encoding="utf-8")
        if kernel.binary is not None:
            (directory / f"{kernel.plan.name}.cubin").write_bytes(kernel.binary.image)
    text = json.dumps(manifest(plan, kernels), indent=2) + "\n"
    (directory / "manifest.json").write_text(text, encoding="utf-8")
    return directory


def manifest(plan: AttentionPlan, kernels: Mapping[Role, Loadable]) -> dict[str, Any]:
    """What a launcher in another language needs: entry points, grids, shared memory, parameter layouts."""
    from flashgen.spec.text.files import spec_to_dict

    return {
        "schema": SCHEMA,
        "flashgen": __version__,
        "spec": spec_to_dict(plan.spec),
        "arch": plan.arch.name,
        "kernels": [_entry(kernel) for kernel in kernels.values()],
    }


def _grid(plan: KernelPlan) -> dict[str, Any]:
    if plan.fixed_blocks is not None:
        return {"blocks": plan.fixed_blocks}
    grid = {"tile": plan.grid_tile, "over": plan.grid_over, "heads": plan.grid_heads, "sequences": plan.grid_batch}
    if plan.is_persistent:
        # All tiles along x, but no more blocks than run at once.
        grid |= {"persistent": True, "most_blocks_per_multiprocessor": plan.min_blocks}
    if plan.overlaps_predecessor:
        # It can be launched with programmatic stream serialization, and need not be.
        grid["overlaps_predecessor"] = True
    return grid


def _counter(plan: KernelPlan) -> dict[str, Any] | None:
    """Device memory that is to hold zeros before the first launch, and that one launch at a time may use."""
    if COUNTER not in plan.params.names:
        return None
    return {"param": COUNTER, "bytes": plan.counters * COUNTER_WORD_BYTES, "initially": 0, "left_behind": 0}


def _tensor_map(plan: KernelPlan, box: Box) -> dict[str, Any]:
    """The arguments of ``cuTensorMapEncodeTiled``; a parameter is the 128 bytes that it makes."""
    return {
        "param": box.parameter,
        "tensor": box.tensor,
        "element": box.element or plan.spec.dtype,
        "dims": ["column", "row", "head", "sequence"],
        "box": [box.columns, box.rows, 1, 1],
        "element_strides": [1, 1, 1, 1],
        "interleave": "none",
        "swizzle_bytes": box.swizzle,
        "fill": "zero",
        "l2_promotion_bytes": box.l2_promotion,
    }


def _entry(kernel: Loadable) -> dict[str, Any]:
    plan, binary = kernel.plan, kernel.binary
    offsets = field_offsets(plan.params)
    return {
        "name": plan.name,
        "role": plan.role,
        "pass": plan.pass_,
        "algorithm": plan.algorithm,
        "source": f"{plan.name}.cu",
        "cubin": None if binary is None else f"{plan.name}.cubin",
        "threads": plan.threads,
        "smem_bytes": plan.smem.bytes,
        "access_bytes": plan.access_bytes,
        "grid": _grid(plan),
        "counter": _counter(plan),
        "workspaces": [
            {"param": w.name, "element": w.dtype or plan.spec.dtype, "extents": list(w.extents)}
            for w in plan.workspaces
        ],
        "tensor_maps": [_tensor_map(plan, box) for box in plan.boxes],
        "params_bytes": plan.params.bytes,
        "params": [
            {"name": p.name, "kind": p.kind, "declared": p.declared, "offset": offsets[p.name]}
            for p in plan.params.params
        ],
        "registers": None if binary is None else binary.resources.registers,
        "spill_bytes": None if binary is None else binary.resources.spill_bytes,
    }
