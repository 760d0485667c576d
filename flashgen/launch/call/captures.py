"""Captured values of masks and scores as arguments of a call: found, checked and packed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from flashgen.common import identifiers
from flashgen.common.checks import checked_mapping
from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.expr import Const, Index, Load, element_type, is_tensor, postorder
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.prepared import Output
from flashgen.plan.model.expressions import Expressions
from flashgen.plan.model.plans import Problem
from flashgen.spec import AttentionSpec
from flashgen.spec.text.declared import Declared

#: Bytes of an element, by its C++ type.
ITEM_BYTES = {
    "u8": 1,
    "signed char": 1,
    "short": 2,
    "half_t": 2,
    "bfloat16_t": 2,
    "i32": 4,
    "float": 4,
    "i64": 8,
    "double": 8,
}


@lru_cache(maxsize=64)
def _named(dtype: Any) -> str:
    """The name of an element type, of whatever library."""
    return str(dtype).rsplit(".", 1)[-1]


class Captures:
    """The captured values of one spec."""

    def __init__(self, spec: AttentionSpec, expressions: Expressions) -> None:
        self._expressions = expressions
        # A spec gathers these anew each time it is asked, and calls ask each time.
        self._declared = dict(spec.tensors)
        self._scalars = dict(spec.scalars)
        self._wanted = {name: (element_type(value), len(value.shape)) for name, value in self._declared.items()}
        self.names = tuple(t.name for t in expressions.tensors)
        # Types known to be tensors, cached because the test is slow.
        self._tensor_types: set[type] = set()

    def arrays(self, given: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """The tensors of a call, in the order of the parameters: those given, else those traced."""
        given = checked_mapping(given)
        if not given.keys() <= self._declared.keys():
            unknown = next(name for name in given if name not in self._declared)
            known = ", ".join(self.names) or "none"
            raise ArgumentError(f"captured={{{show(unknown)}: ...}} is not a captured tensor; this kernel has {known}")
        return tuple(self._checked(name, given.get(name, self._declared[name])) for name in self.names)

    def _checked(self, name: str, value: Any) -> Any:
        element, rank = self._wanted[name]
        kind = type(value)
        if kind not in self._tensor_types:
            if isinstance(value, Declared):
                raise ArgumentError(f"the captured tensor {name} has no value; pass captured={{{name!r}: tensor}}")
            if not is_tensor(value):
                raise ArgumentError(f"captured[{name!r}] is a {kind.__name__}; pass a tensor of {element}")
            self._tensor_types.add(kind)
        if _named(value.dtype) != element or len(value.shape) != rank:
            raise ArgumentError(
                f"captured[{name!r}] has {len(value.shape)} dimensions of {element_type(value)}; the kernel was built "
                f"for {rank} of {element}: convert it, or build a spec that captures it"
            )
        return value

    def values(self, infos: Sequence[ArrayInfo]) -> dict[str | None, float]:
        """Scalars, and the strides and sizes of the tensors."""
        values: dict[str | None, float] = {
            identifiers.captured(name): float(self._scalars[name]) if kind == "float" else int(self._scalars[name])
            for name, kind in self._expressions.scalars
        }
        for info in infos:
            for i, (size, stride) in enumerate(zip(info.shape, info.strides, strict=True)):
                values[identifiers.size(info.name, i)] = size
                values[identifiers.stride(info.name, i)] = stride
        return values

    def check(self, infos: Sequence[ArrayInfo], q: ArrayInfo, problem: Problem) -> None:
        """Checks that tensors are on q's device, and large enough for b, h, q or k that index a dimension alone."""
        for info in infos:
            if info.device != q.device:
                raise ArgumentError(f"captured[{info.name!r}] is on {info.where}, q on {q.where}; move it there")
        needed = {"b": problem.batch, "h": problem.heads_q, "q": problem.len_q, "k": problem.len_kv}
        shapes = {info.name: info.shape for info in infos}
        is_empty = problem.batch * problem.heads_q * problem.len_q * problem.len_kv == 0
        for name, shape in shapes.items():
            # Kernels clamp indices to the tensor, so it must not be empty.
            if 0 in shape and not is_empty:
                raise ArgumentError(f"captured[{name!r}] is empty, of shape {shape}; give it an element for each index")
        e = self._expressions
        roots = [root for root in (e.mask, e.score, e.sink) if root is not None]
        for node in postorder(*roots):
            if not isinstance(node, Load):
                continue
            for axis, index in enumerate(node.indices):
                size = shapes[node.tensor.name][axis]
                if isinstance(index, Index) and size < needed[index.name]:
                    raise ArgumentError(
                        f"captured[{node.tensor.name!r}] has {size} elements in dimension {axis}, which is indexed "
                        f"with {index.name}, and this call has {needed[index.name]}; give it as many"
                    )
                if isinstance(index, Const) and size <= index.value and not is_empty:
                    raise ArgumentError(
                        f"captured[{node.tensor.name!r}] has {size} elements in dimension {axis}, of which the kernel "
                        f"reads element {index.value}; give it {index.value + 1} or more"
                    )

    def tables(self, infos: Sequence[ArrayInfo], stretch: int) -> tuple[Output, ...]:
        """Workspaces for the tables of extremes: two 32-bit numbers per entry, or four.

        ``stretch`` is that of the kernels that will run: others, for other alignments, may have narrower tiles.
        """
        shapes = {info.name: info.shape for info in infos}
        made = []
        for table in self._expressions.tables:
            *others, length = (n for i, n in sorted(enumerate(shapes[table.tensor]), key=lambda x: x[0] == table.axis))
            entries = math.prod(others) * -(-length // stretch)
            made.append(Output(table.parameter, (table.numbers * entries,), "fp32"))
        return tuple(made)

    def item_bytes(self) -> tuple[int, ...]:
        """Element size of each tensor, in bytes."""
        return tuple(ITEM_BYTES[t.element] for t in self._expressions.tensors)
