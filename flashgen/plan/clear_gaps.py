"""Planning the kernel `clear_gaps`: after either pass, it clears the packed rows outside every sequence."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.plans import Constant, KernelPlan, Param, ParamTable, SmemMap
from flashgen.spec import full

_WARPS = 4
#: Rows of a block. A warp reads all offsets once for its share of them.
_ROWS = 32
_PARAMS = ParamTable.widest_first(
    (
        Param("cu_seqlens_q", "void*", "const i32*", "where the queries of each sequence begin"),
        Param("cu_seqlens_k", "void*", "const i32*"),
        Param("o", "void*", "element_t*", "results of a pass; null: of the other one"),
        Param("lse", "void*", "float*"),
        *(Param(name, "void*", "element_t*") for name in ("dq", "dk", "dv")),
        Param("total_q", "int64", "i64", "rows of queries, and of keys"),
        Param("total_kv", "int64", "i64"),
        Param("batch", "int32", "i32", "sequences"),
        Param("heads_q", "int32", "i32"),
        Param("heads_kv", "int32", "i32"),
        Param("len_q", "int32", "i32", "of the longest sequence"),
        Param("len_kv", "int32", "i32"),
    )
)


def plan_clear_gaps(forward: KernelPlan) -> KernelPlan:
    """The kernel for all specs that differ in mask, score or direction alone."""
    spec = replace(forward.spec, mask=full(), score=None, direction="forward", deterministic=False, dropout=False)
    # It writes results alone.
    spec = replace(spec, dtype=spec.out_element.name, out_dtype=None, scale_block=None)
    dims = [Constant(name, int(getattr(spec, name))) for name in ("head_dim", "head_dim_v")]
    return KernelPlan(
        name=kernel_name(spec, "clear_gaps", forward.arch),
        pass_="forward",
        role="clear_gaps",
        algorithm=forward.algorithm,
        template="clear_gaps.cu.j2",
        spec=spec,
        arch=forward.arch,
        threads=_WARPS * 32,
        config_type="ClearGapsConfig",
        config=(
            *dims,
            Constant("rows", _ROWS),
            Constant("warps", _WARPS),
            Constant("access_bytes", forward.access_bytes),
        ),
        params=_PARAMS,
        smem=SmemMap(),
        grid_tile=_ROWS,
        grid_over="rows",
        grid_heads="one",
        grid_batch="one",
        access_bytes=forward.access_bytes,
    )
