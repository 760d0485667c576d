"""The expressions that a kernel evaluates for its mask and its score, and the parameters that they read.

A mask that is a band needs none: ``Band`` and two numbers describe it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.common import identifiers
from flashgen.errors import PlanError
from flashgen.plan.model.expressions import NO_EXPRESSIONS, CapturedTensor, Expressions, Table
from flashgen.plan.model.plans import Param, ParamTable
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.expr import Node, Range, TileRule

#: C++ types of the elements of captured tensors.
ELEMENTS = {
    "bool": "u8",
    "uint8": "u8",
    "int8": "signed char",
    "int16": "short",
    "int32": "i32",
    "int64": "i64",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
_SCALARS = {"bool": ("int32", "i32"), "int": ("int32", "i32"), "float": ("float", "float")}


def expressions_of(spec: AttentionSpec) -> Expressions:
    """The expressions of a spec."""
    if _is_band(spec) and spec.score is None:
        return NO_EXPRESSIONS
    from flashgen.expr import Score, derivative, element_type

    by_mask = not _is_band(spec)
    score = spec.score.traced.root if spec.score is not None and spec.score.changes_logits else None
    sink = spec.score.sink if spec.score is not None else None
    mask = spec.mask.traced.root if by_mask else None
    used = _captured_names(*(root for root in (mask, score, sink.root if sink else None) if root is not None))
    rule = spec.mask.rule if by_mask else None
    return Expressions(
        mask=mask,
        rule=rule,
        score=score,
        slope=None if score is None else derivative(score, Score()),
        sink=None if sink is None else sink.root,
        scalars=tuple((name, _kind(value)) for name, value in sorted(spec.scalars.items()) if name in used),
        tensors=tuple(
            CapturedTensor(name, element_of(name, element_type(value)), len(value.shape))
            for name, value in sorted(spec.tensors.items())
            if name in used
        ),
        tables=() if rule is None else _tables(rule),
    )


def _is_band(spec: AttentionSpec) -> bool:
    """Whether the mask is a band. With own lengths per sequence, a mask that mixes both alignments is not."""
    return spec.mask.is_band and not (spec.has_own_lengths and spec.mask.rest is not None)


def _tables(rule: TileRule) -> tuple[Table, ...]:
    """The tables that hold what the tile rule reads of whole tiles."""
    from flashgen.expr import Range, Search, postorder

    roots = (rule.may, rule.full, rule.key_begin, rule.key_end, rule.query_begin, rule.query_end)
    nodes = postorder(*roots)
    ranges = [node for node in nodes if isinstance(node, Range) and node.whole]
    searched = {(node.tensor.name, node.axis) for node in nodes if isinstance(node, Search)}
    axes: dict[tuple[str, str], set[int]] = {}
    for node in ranges:
        axes.setdefault((node.tensor.name, node.whole), set()).add(_varying_axis(node))
    sides = dict.fromkeys(searched, "")
    for (tensor, side), found in sorted(axes.items()):
        # A tensor that is indexed with q in two places gets no table. Kernels then read its elements.
        if len(found) == 1:
            place = (tensor, found.pop())
            sides[place] = sides.get(place, "") + side
    return tuple(
        Table(tensor, axis, "".join(sorted(found)), (tensor, axis) in searched)
        for (tensor, axis), found in sorted(sides.items())
    )


def _varying_axis(node: Range) -> int:
    """The dimension along which a range covers a whole tile."""
    return next(i for i, (low, high) in enumerate(zip(node.low, node.high, strict=True)) if low is not high)


def with_captures(table: ParamTable, expressions: Expressions, *, writes_tables: bool = False) -> ParamTable:
    """A kernel's parameters with those that its expressions read, widest first, so that the struct has no padding."""
    if expressions is NO_EXPRESSIONS:
        return table
    tensors = expressions.tensors
    pointers = [Param(t.identifier, "void*", f"const {t.element}*") for t in tensors]
    pointers += [Param(t.parameter, "void*", "i32*" if writes_tables else "const i32*") for t in expressions.tables]
    strides = [Param(stride, "int64", "i64") for t in tensors for stride in t.strides]
    sizes = [Param(size, "int32", "i32") for t in tensors for size in t.sizes]
    scalars = [Param(identifiers.captured(name), *_SCALARS[kind]) for name, kind in expressions.scalars]
    every = [*table.params, *pointers, *strides, *sizes, *scalars]
    return ParamTable.widest_first(every)


def _captured_names(*roots: Node) -> set[str]:
    from flashgen.expr import Load, Scalar, postorder

    return {
        node.name if isinstance(node, Scalar) else node.tensor.name
        for node in postorder(*roots)
        if isinstance(node, (Scalar, Load))
    }


def _kind(value: int | float) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def element_of(name: str, dtype: str) -> str:
    """The C++ type of a captured tensor's elements."""
    if dtype not in ELEMENTS:
        raise PlanError(f"the captured tensor {name} has elements of type {dtype}; use one of {', '.join(ELEMENTS)}")
    return ELEMENTS[dtype]
