"""Planning the survey: the kernel that finds the extremes of captured tensors, tile by tile."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.expressions import with_captures
from flashgen.plan.model.expressions import Expressions
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.plans import Constant, KernelPlan, ParamTable, SmemMap
from flashgen.plan.model.smem import SmemLayout

_BLOCKS = 32
_WARPS = 16
#: No tile is narrower, and a wider entry would blur the edges of tiles.
_WIDEST = 64


def with_tables(kernels: tuple[KernelPlan, ...], expressions: Expressions) -> Expressions:
    """The expressions with an entry of their tables for every so many elements: the narrowest tile there is."""
    names = ("tile_q", "tile_kv")
    tiles = [int(c.value) for k in kernels for c in k.config if c.name in names]
    return replace(expressions, stretch=min(_WIDEST, *tiles)) if expressions.tables else expressions


def plan_survey(forward: KernelPlan, expressions: Expressions) -> KernelPlan:
    """The survey for the kernels that evaluate these expressions; it reads no queries, keys or values."""
    needed = {table.tensor for table in expressions.tables}
    is_searched = any(table.is_searched for table in expressions.tables)
    own = replace(
        expressions,
        mask=None,
        rule=None,
        score=None,
        slope=None,
        sink=None,
        scalars=(),
        tensors=tuple(t for t in expressions.tensors if t.name in needed),
    )
    return replace(
        forward,
        name=kernel_name(forward.spec, "survey", forward.arch),
        role="survey",
        template="survey.cu.j2",
        threads=_WARPS * 32,
        config_type="SurveyConfig",
        config=(
            Constant("stretch", expressions.stretch, "elements per entry of a table"),
            Constant("blocks", _BLOCKS),
            Constant("warps", _WARPS),
        ),
        params=with_captures(ParamTable(()), own, writes_tables=True),
        smem=SmemLayout().then("scratch", 8 * _WARPS, "two numbers for each warp").map() if is_searched else SmemMap(),
        grid_tile=0,
        fixed_blocks=_BLOCKS,
        is_persistent=False,
        overlaps_predecessor=False,
        boxes=(),
        product_columns=(),
        refuses_spills=False,
        reasons=(),
        switches=frozenset(),
        expressions=own,
        score=None,
    )
