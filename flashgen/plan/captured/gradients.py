"""Planning the gradients of captured float tensors: which kernels they take, and what each of them adds up.

    captured_clear    zeroes what is added to, and gradients (or parts of them) that no pair reaches
    captured_pairs    dS of all pairs once more, added to the sums of every tensor that is summed
    captured_tile0    dS as it is, summed over sequences and heads in registers: a bias, one kernel for each
    captured_sink     what the rows' sinks add
    captured_store    sums to the tensors' dtypes

Sums are exact (``flashgen/accumulator.cuh``), so the order in which blocks add to them does not matter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.arch import Arch
from flashgen.common import identifiers
from flashgen.plan.captured.load_dependence import over_of, tile_places
from flashgen.plan.model import params
from flashgen.plan.model.captured_work import CapturedGradient, CapturedWork, How, Share
from flashgen.plan.model.expressions import CapturedTensor, Expressions
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.plans import Constant, KernelPlan, Param, ParamTable, Role, SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.plan.portable.backward import plan_query
from flashgen.spec import AttentionSpec, Schedule

if TYPE_CHECKING:
    from flashgen.expr import Node

#: C++ types of elements that have gradients, and the dtypes of those.
DTYPES = {"half_t": "fp16", "bfloat16_t": "bf16", "float": "fp32", "double": "fp64"}
#: Of the kernels that go through elements or rows one by one.
_THREADS, _BLOCKS, _SINK_ROWS = 256, 64, 1024


def gradients_of(expressions: Expressions | None) -> tuple[CapturedGradient, ...]:
    """One for each captured float tensor."""
    # Without any there is no need to import what expressions are made of.
    if expressions is None or not expressions.tensors:
        return ()
    pairs, sinks = (_shares(root, expressions) for root in (expressions.score, expressions.sink))
    return tuple(
        _gradient(
            tensor,
            tuple(share for share in pairs if share.tensor is tensor),
            tuple(share for share in sinks if share.tensor is tensor),
        )
        for tensor in expressions.tensors
        if tensor.element in DTYPES
    )


def _gradient(tensor: CapturedTensor, pairs: tuple[Share, ...], sinks: tuple[Share, ...]) -> CapturedGradient:
    how: How = "sum"
    if not pairs and not sinks:
        how = "none"
    elif not sinks and len(pairs) == 1 and tile_places(pairs[0].load.indices) is not None:
        how = "tile"
    return CapturedGradient(tensor, pairs, sinks, how)


def _shares(root: Node | None, expressions: Expressions) -> tuple[Share, ...]:
    from flashgen.expr import Const, Load, captured_gradients

    tensors = {tensor.name: tensor for tensor in expressions.tensors}
    return tuple(
        Share(tensors[load.tensor.name], load, slope, over_of(load.indices))
        for load, slope in (() if root is None else captured_gradients(root))
        if isinstance(load, Load) and slope is not Const(0.0)
    )


def plan_captured(
    spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int, expressions: Expressions
) -> tuple[KernelPlan, ...]:
    """The kernels of captured gradients, in the order in which they run; none where there are no such tensors."""
    gradients = gradients_of(expressions)
    if not gradients:
        return ()
    base = plan_query(spec, schedule, arch, access_bytes)
    summed = tuple(g for g in gradients if g.how == "sum")
    work = CapturedWork(summed=summed, cleared=tuple(g for g in gradients if g.how != "sum"))
    kernels = [_plain(base, "captured_clear", work)]
    pairs = tuple(share for g in summed for share in g.pairs)
    if pairs:
        lines = any(share.over in ("columns", "diagonals") for share in pairs)
        over_pairs = plan_query(spec, schedule, arch, access_bytes, lines=lines)
        kernels.append(_pairs(over_pairs, CapturedWork(shares=pairs, summed=summed)))
    tiles = [g for g in gradients if g.how == "tile"]
    # Three accumulators for each pair: with wider tiles the assembler runs out of registers.
    narrow = plan_query(spec, schedule, arch, access_bytes, tile_kv=32 if spec.element.is_half else None)
    kernels += [_tile(narrow, f"captured_tile{i}", CapturedWork(shares=g.pairs)) for i, g in enumerate(tiles)]
    sinks = tuple(share for g in summed for share in g.sinks)
    if sinks:
        kernels.append(_sink(base, CapturedWork(shares=sinks, summed=summed)))
    if summed:
        kernels.append(_plain(base, "captured_store", CapturedWork(summed=summed)))
    return tuple(kernels)


def _pairs(base: KernelPlan, work: CapturedWork) -> KernelPlan:
    return _captured(base, "captured_pairs", work, params=_with_work(params.PAIRS, work))


def _tile(base: KernelPlan, role: Role, work: CapturedWork) -> KernelPlan:
    (share,) = work.shares
    places = tile_places(share.load.indices) or ()
    gradient = Param(identifiers.gradient(share.tensor.name), "void*", f"{share.tensor.element}*")
    return replace(
        _captured(base, role, work, params=ParamTable((*params.PAIRS.params, gradient))),
        template="backward_captured_tile.cu.j2",
        grid_over="pairs",
        grid_heads="q" if "h" in places else "one",
        grid_batch="each" if "b" in places else "one",
    )


def _sink(base: KernelPlan, work: CapturedWork) -> KernelPlan:
    return replace(
        _captured(base, "captured_sink", work, params=_with_work(params.SINK, work)),
        threads=_THREADS,
        config_type="SinkConfig",
        config=(Constant("rows", _SINK_ROWS, "query rows per block"),),
        smem=SmemLayout().then("sums", _THREADS // 32 * 4, "a float for each warp").map(),
        grid_tile=_SINK_ROWS,
        reasons=(),
    )


def _plain(base: KernelPlan, role: Role, work: CapturedWork) -> KernelPlan:
    """A kernel that goes through elements."""
    table = _with_work(ParamTable(()), work)
    if role == "captured_store":
        gradients = [Param(g.parameter, "void*", f"{g.tensor.element}*") for g in work.summed]
        table = ParamTable((*gradients, *table.params))
    return replace(
        _captured(base, role, work, params=table),
        threads=_THREADS,
        config_type="ElementsConfig",
        config=(Constant("blocks", _BLOCKS),),
        smem=SmemMap(),
        fixed_blocks=_BLOCKS,
        reasons=(),
        params=ParamTable(tuple(sorted(table.params, key=lambda p: ("void*", "int64").index(p.kind)))),
    )


def _with_work(table: ParamTable, work: CapturedWork) -> ParamTable:
    """Parameters and those that say where sums are, and what to clear."""
    sums = [Param(g.sums, "void*", "u64*") for g in work.summed]
    sums += [Param(g.elements, "int64", "i64") for g in work.summed]
    cleared = [Param(g.parameter, "void*", f"{g.tensor.element}*") for g in work.cleared]
    cleared += [Param(g.cleared, "int64", "i64") for g in work.cleared]
    return ParamTable((*table.params, *sums, *cleared))


def _captured(base: KernelPlan, role: Role, work: CapturedWork, *, params: ParamTable) -> KernelPlan:
    # Of what the tiles hold for dQ, two say more than is so here.
    notes = {"q": "Q_i", "lse": "L_i, and a sum of each warp at the end"}
    regions = (replace(region, note=notes.get(region.name, region.note)) for region in base.smem.regions)
    return replace(
        base,
        name=kernel_name(base.spec, role, base.arch),
        role=role,
        template=f"backward_{role}.cu.j2",
        params=params,
        smem=SmemMap(tuple(regions)),
        captured=work,
    )
