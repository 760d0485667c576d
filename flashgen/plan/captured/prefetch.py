"""Which elements of captured tensors a kernel prefetches before the products that their scores need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashgen.plan.model.expressions import Expressions

if TYPE_CHECKING:
    from flashgen.expr import Load, Node

#: Bytes of each element type that can be prefetched.
_BYTES = {"half_t": 2, "bfloat16_t": 2, "float": 4}
#: Bytes per pair that registers hold: in the forward kernel, and in the backward kernel beside dP, dK and dV.
MAX_PREFETCH_BYTES, MAX_PREFETCH_BYTES_BACKWARD = 4, 2


def prefetched_loads_of(expressions: Expressions, most_bytes: int = MAX_PREFETCH_BYTES) -> tuple[Load, ...]:
    """The loads of a kernel's score to issue before the products."""
    return prefetched_loads(
        expressions.score, {tensor.name: tensor.element for tensor in expressions.tensors}, most_bytes
    )


def prefetched_loads(
    score: Node | None, elements: Mapping[str, str], most_bytes: int = MAX_PREFETCH_BYTES
) -> tuple[Load, ...]:
    """Loads that differ from pair to pair and whose last index is k, so that a lane's pairs are neighbors in memory.

    As many as registers hold. ``elements`` are the tensors' C++ types.
    """
    if score is None or not elements:
        return ()
    from flashgen.expr import Index, Load, postorder
    from flashgen.expr.tree.nodes import USES

    found: list[Load] = []
    left = most_bytes
    for node in postorder(score):
        if not isinstance(node, Load) or not node.indices or node.indices[-1] is not Index("k"):
            continue
        uses = 0
        for index in node.indices[:-1]:
            uses |= index.uses
        size = _BYTES.get(elements[node.tensor.name], left + 1)
        if uses & USES["q"] and not uses & (USES["k"] | USES["s"]) and size <= left:
            found.append(node)
            left -= size
    return tuple(found)
