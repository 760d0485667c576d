"""Which elements of captured tensors a kernel may fetch before the products whose scores they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashgen.plan.model.expressions import Expressions

if TYPE_CHECKING:
    from flashgen.expr import Load, Node

#: Bytes of elements that are fetched with their neighbours, by C++ type, and how many bytes for each pair of a query
#: and a key there are registers for: where scores are alone, and where they are with dP, dK and dV.
_BYTES = {"half_t": 2, "bfloat16_t": 2, "float": 4}
MOST_BYTES, MOST_BYTES_BACKWARD = 4, 2


def loads_ahead_of(expressions: Expressions, most_bytes: int = MOST_BYTES) -> tuple[Load, ...]:
    """Loads of a kernel's score that may come before the products."""
    return loads_ahead(expressions.score, {tensor.name: tensor.element for tensor in expressions.tensors}, most_bytes)


def loads_ahead(score: Node | None, elements: Mapping[str, str], most_bytes: int = MOST_BYTES) -> tuple[Load, ...]:
    """Loads that differ from pair to pair, of rows that the keys go along, so that a lane's pairs are neighbours there:
    as many as there is room for. ``elements`` are the tensors' C++ types."""
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
