"""Planning the kernel `quantize`: 16-bit queries, keys and values to e4m3, with a scale for each block of rows."""

from __future__ import annotations

import math
from dataclasses import replace

from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import INPUT_SCALES
from flashgen.plan.model.plans import Constant, KernelPlan, Param, ParamTable, Problem, Role
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import full

QUANTIZE: Role = "quantize"
#: The results, in order, and what each is made of.
CODES = ("q8", "k8", "v8")
_INPUTS = ("q", "k", "v")
#: How many elements a thread holds in registers; kSegment in quantize.cuh.
_SEGMENT = 64
#: Threads on a multiprocessor, so that each may have 80 registers: fewer bring too few bytes at a time.
_RESIDENT_THREADS = 768
#: Blocks on a multiprocessor, at most.
_MOST_BLOCKS = 16
#: Blocks of rows that a thread block quantizes at most. Each is copied while the one before is computed.
_MOST_ROW_BLOCKS = 4
#: Rows that begin at multiples of this many bytes are read in chunks of as many.
ACCESS_BYTES = 16
_SCALE_NOTE = "what the codes of each block of rows are multiplied by"


def plan_quantize(forward: KernelPlan) -> KernelPlan:
    """The kernel for all specs that differ in the mask or the score alone."""
    spec, arch = forward.spec, forward.arch
    assert spec.scale_block is not None, "a spec with blocks"
    bare = replace(spec, mask=full(), score=None)
    widest = max(spec.head_dim, spec.head_dim_v)
    warps = -(-spec.scale_block * widest // (_SEGMENT * 32))
    elements = warps * 32 * _SEGMENT
    smem = SmemLayout().then("rows", elements * spec.out_element.bytes).then("codes", elements)
    smem_map = smem.then("maxima", 8 * warps, "two of each warp").map()
    resident = min(
        _MOST_BLOCKS,
        _RESIDENT_THREADS // (warps * 32),
        arch.smem_per_multiprocessor // (smem_map.bytes + arch.reserved_smem_per_block),
    )
    return KernelPlan(
        name=kernel_name(bare, QUANTIZE, arch),
        pass_="forward",
        role=QUANTIZE,
        algorithm=forward.algorithm,
        template="quantize.cu.j2",
        spec=bare,
        arch=arch,
        threads=warps * 32,
        config_type="QuantizeConfig",
        config=(
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("block", spec.scale_block, "rows that share a scale"),
            Constant("warps", warps),
        ),
        params=_params(),
        smem=smem_map,
        grid_tile=spec.scale_block,
        grid_over="rows",
        grid_heads="all",
        # Whether it reads whole chunks is decided when it runs; this keeps the alignment of the plan.
        access_bytes=forward.access_bytes,
        min_blocks=max(1, resident),
    )


def row_blocks(quantize: KernelPlan, problem: Problem, multiprocessors: int) -> int:
    """How many blocks of rows each thread block quantizes: the number of waves of thread blocks, at most four."""
    at_once = multiprocessors * quantize.min_blocks
    return max(1, min(_MOST_ROW_BLOCKS, -(-math.prod(quantize.grid(problem)) // at_once)))


def _params() -> ParamTable:
    pointers = [Param(name, "void*", "const element_t*") for name in _INPUTS]
    pointers += [Param(name, "void*", "e4m3_t*") for name in CODES]
    pointers += [Param(name, "void*", "float*", _SCALE_NOTE if name == "q_scale" else "") for name in INPUT_SCALES]
    strides = [
        Param(f"{name}_{axis}", "int64", "i64", "strides are in elements" if (name, axis) == ("q", "batch") else "")
        for name in (*_INPUTS, *CODES)
        for axis in ("batch", "row", "head")
    ]
    strides += [Param(f"{name}_{axis}", "int64", "i64") for name in INPUT_SCALES for axis in ("batch", "head")]
    sizes = [Param(name, "int32", "i32") for name in ("heads_q", "heads_kv", "len_q", "len_kv")]
    flags = [
        Param("rotates", "int32", "i32", "1: queries and keys are rotated"),
        Param("is_aligned", "int32", "i32", "1: all rows begin at multiples of 16 bytes"),
    ]
    blocks = Param("blocks", "int32", "i32", "blocks of rows of each thread block; the grid is smaller in proportion")
    return ParamTable.widest_first((*pointers, *strides, *sizes, *flags, blocks))
