"""Sizes of captured tensors that became part of a kernel's code when it was traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.errors import ArgumentError
from flashgen.spec import AttentionSpec
from flashgen.spec.text.declared import Declared

#: Of each tensor that has any, the dimensions and their sizes.
Sizes = Mapping[str, Mapping[int, int]]


def fixed_sizes(spec: AttentionSpec) -> Sizes:
    """The sizes that the mask and the score of a spec were traced for.

    A dimension has one where its indices cannot go beyond the last element, whatever the call. They are 0 in a
    dimension that is broadcast, or a distance limited to the width of a table. Of a longer dimension the code would
    read a part, and of a shorter one the wrong elements.
    """
    from flashgen.expr import Load, postorder
    from flashgen.expr.analysis.bounds import static_range

    tensors = {name: value for name, value in spec.tensors.items() if not isinstance(value, Declared)}
    last: dict[str, dict[int, int]] = {name: {} for name in tensors}
    for node in postorder(*_roots(spec)):
        if isinstance(node, Load) and node.tensor.name in tensors:
            of_tensor = last[node.tensor.name]
            for axis, index in enumerate(node.indices):
                of_tensor[axis] = max(of_tensor.get(axis, 0), static_range(index)[1])
    exact = {
        name: {axis: end + 1 for axis, end in of_tensor.items() if int(tensors[name].shape[axis]) == end + 1}
        for name, of_tensor in last.items()
    }
    return {name: sizes for name, sizes in exact.items() if sizes}


def check_sizes(fixed: Sizes, captured: Mapping[str, Any]) -> None:
    """ArgumentError for a captured tensor of a call that the code was not traced for."""
    for name, value in captured.items():
        shape = tuple(getattr(value, "shape", ()))
        for axis, size in fixed.get(name, {}).items():
            # Tensors of another rank are refused where all of them are looked at.
            if axis < len(shape) and shape[axis] != size:
                raise ArgumentError(
                    f"captured[{name!r}] has shape {shape}, with {shape[axis]} elements in dimension {axis}; the "
                    f"kernel was built for {size} there: build a spec that captures this tensor"
                )


def _roots(spec: AttentionSpec) -> list[Any]:
    traced = [] if spec.mask.rest is None else [spec.mask.traced]
    if spec.score is not None:
        traced += [spec.score.traced] if spec.score.sink is None else [spec.score.traced, spec.score.sink]
    return [part.root for part in traced]
