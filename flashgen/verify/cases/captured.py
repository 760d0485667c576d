"""Values for captured tensors. The spec gives element types and ranks; the indices in the expression give sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.expr import Load, Traced
    from flashgen.verify.cases.case import Case

#: Few enough that integers are often equal, as the ids of documents are.
_FEW = 4
_OFTEN_TRUE = 0.7


def with_values(spec: AttentionSpec, case: Case) -> AttentionSpec:
    """The spec with values of the right sizes for a case in place of its captured tensors; the same for equal cases.

    Each dimension is as long as the indices that occur in it ask for. Integers are small or reach as far as the
    sequences; a tensor that they index is as large as that needs.
    """
    if not spec.tensors:
        return spec
    return spec.with_tensors(_Draw(spec, case).values())


class _Draw:
    """The tensors of one case. A tensor that indexes another one is drawn first."""

    def __init__(self, spec: AttentionSpec, case: Case) -> None:
        self._spec, self._case = spec, case
        self._loads = _loads_of(spec)
        self._found: dict[str, NDArray[Any]] = {}
        self._envs = [self._env(range(case.batch), case.len_q, case.len_kv)]
        # Where less is used of a sequence, its queries and keys can be further apart, counted from its end.
        cut = case.packing_for(spec) or case.filling_for(spec)
        self._envs += [self._env([b], *used) for b, used in enumerate(cut.used if cut else ())]

    def _env(self, batch: Sequence[int], len_q: int, len_kv: int) -> dict[str, Any]:
        """What expressions see of these sequences."""
        places = (batch, range(self._case.heads), range(len_q), range(len_kv))
        shapes = ([-1 if i == axis else 1 for i in range(4)] for axis in range(4))
        indices = (np.array(place, np.int64).reshape(shape) for place, shape in zip(places, shapes, strict=True))
        return {**self._spec.scalars, "q_len": len_q, "k_len": len_kv, **dict(zip("bhqk", indices, strict=True))}

    def values(self) -> dict[str, NDArray[Any]]:
        """An array for each tensor."""
        found = self._found
        while len(found) < len(self._loads):
            ready = [name for name in self._loads if name not in found and self._needs(name) <= set(found)]
            if not ready:
                names = ", ".join(name for name in self._loads if name not in found)
                raise SpecError(f"{names} index each other, so no values can be drawn; verify with values of your own")
            for name in ready:
                found[name] = self._array(name)
        return found

    def _needs(self, name: str) -> set[str]:
        from flashgen.expr import Load, postorder

        indices = [index for load in self._loads[name] for index in load.indices]
        return {node.tensor.name for node in postorder(*indices) if isinstance(node, Load)}

    def _array(self, name: str) -> NDArray[Any]:
        from flashgen.expr import element_type

        random = np.random.default_rng([self._case.seed, *self._case.name.encode(), *name.encode()])
        kind, shape = element_type(self._spec.tensors[name]), self._shape(name)
        if kind == "bool":
            return random.random(shape) < _OFTEN_TRUE
        if kind == "bfloat16":
            import ml_dtypes

            return random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        dtype = np.dtype(kind)
        if dtype.kind == "f":
            return random.standard_normal(shape).astype(dtype)
        far = max(self._case.len_q, self._case.len_kv) + 1
        high = min(random.choice((_FEW, far)), np.iinfo(dtype).max)
        return random.integers(0, high, shape).astype(dtype)

    def _shape(self, name: str) -> tuple[int, ...]:
        from flashgen.expr import evaluate_all

        rank = len(self._loads[name][0].indices)
        sizes = [1] * rank
        for load, env in product(self._loads[name], self._envs):
            for axis, index in enumerate(evaluate_all(list(load.indices), {**env, **self._found})):
                if index.size and index.min() < 0:
                    raise SpecError(
                        f"dimension {axis} of {name} is indexed with {int(index.min())} when there are "
                        f"{env['q_len']} queries and {env['k_len']} keys; bound the index with maximum(..., 0)"
                    )
                sizes[axis] = max(sizes[axis], int(index.max()) + 1 if index.size else 1)
        return tuple(map(max, sizes, self._fixed(name)))

    def _fixed(self, name: str) -> tuple[int, ...]:
        """The sizes that a kernel built with this tensor relies on, even if a call reads less of it; 0 for others."""
        from flashgen.expr.analysis.bounds import static_range

        loads = self._loads[name]
        shape = getattr(self._spec.tensors[name], "shape", ())
        ends = [max(static_range(x.indices[axis])[1] for x in loads) + 1 for axis in range(len(shape))]
        return tuple(end if end == size else 0 for end, size in zip(ends, shape, strict=True))


def _loads_of(spec: AttentionSpec) -> Mapping[str, list[Load]]:
    """Where each captured tensor is read."""
    from flashgen.expr import Load, postorder

    loads: dict[str, list[Load]] = {}
    for traced in _expressions(spec):
        for node in postorder(traced.root):
            if isinstance(node, Load):
                loads.setdefault(node.tensor.name, []).append(node)
    return loads


def _expressions(spec: AttentionSpec) -> Iterator[Traced]:
    if spec.mask.rest is not None:
        yield spec.mask.traced
    if spec.score is not None:
        yield spec.score.traced
        if spec.score.sink is not None:
            yield spec.score.sink
