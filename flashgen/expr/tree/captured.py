"""Captured tensors in the hands of user code."""

from __future__ import annotations

from typing import Any

from flashgen.expr.tree.blame import fail
from flashgen.expr.tree.build import article, as_node
from flashgen.expr.tree.nodes import Const, Load, Node, Tensor
from flashgen.expr.tree.operators import Operators
from flashgen.expr.tree.text import text


class Captured(Operators):
    """A captured tensor in the hands of user code: it can be indexed, and nothing else.

    Missing indices may follow in brackets of their own: ``bias[b][q]`` is ``bias[b, q]``.
    """

    def __init__(self, tensor: Tensor, shape: tuple[int, ...], indices: tuple[Node, ...] = ()) -> None:
        self._tensor, self._indices = tensor, indices
        self.shape, self.ndim = shape, len(shape)

    def __getitem__(self, indices: object) -> Node | Captured:  # type: ignore[override]
        given = indices if isinstance(indices, tuple) else (indices,)
        nodes = (*self._indices, *checked_indices(self._tensor, given, len(self._indices)))
        if len(nodes) < self._tensor.rank:
            return Captured(self._tensor, self.shape[len(given) :], nodes)
        return load(self._tensor, nodes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        fail(
            f"{self._tensor.name}.{name} is not in the language; a captured tensor can only be indexed: {self._example}"
        )

    @property
    def advice(self) -> str:
        """What to do instead of using the tensor as a number."""
        return f"{self._text} is a tensor of {self.ndim} dimensions and has to be indexed: {self._example}"

    @property
    def _text(self) -> str:
        chosen = f"[{', '.join(map(text, self._indices))}]" if self._indices else ""
        return self._tensor.name + chosen

    @property
    def _example(self) -> str:
        return f"{self._text}[{', '.join('bhqk'[-self.ndim :] if self.ndim < 5 else 'bhqk')}]"


def load(tensor: Tensor, indices: tuple[object, ...]) -> Node:
    """An element of a captured tensor."""
    nodes = checked_indices(tensor, indices)
    if len(nodes) != tensor.rank:
        fail(_wrong_number(tensor, len(nodes)))
    return Load(tensor, nodes)


def checked_indices(tensor: Tensor, indices: tuple[object, ...], before: int = 0) -> tuple[Node, ...]:
    """Indices of dimensions from ``before`` on."""
    for index in indices:
        if isinstance(index, slice) or index is None or index is Ellipsis:
            fail(
                f"{tensor.name} takes one number per dimension and no slices, since a traced value is one number: "
                f"{tensor.name}[h]"
            )
    if before + len(indices) > tensor.rank:
        fail(_wrong_number(tensor, before + len(indices)))
    nodes = tuple(as_node(index) for index in indices)
    for number, node in enumerate(nodes, start=before):
        if node.type != "int":
            fail(
                f"index {number} of {tensor.name} is {article(node.type)}; an index must be a whole number, "
                "so use //, not /"
            )
        if isinstance(node, Const) and node.value < 0:
            fail(f"index {number} of {tensor.name} is {node.value}; indices count from 0 and not from the end")
    return nodes


def _wrong_number(tensor: Tensor, given: int) -> str:
    return f"{tensor.name} has {tensor.rank} dimensions and got {given} indices; give one for each"
