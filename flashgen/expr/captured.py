"""Captured tensors in the hands of user code."""

from __future__ import annotations

from typing import Any

from flashgen.expr.blame import fail
from flashgen.expr.build import article, as_node
from flashgen.expr.nodes import Const, Load, Node, Tensor
from flashgen.expr.operators import Operators


class Captured(Operators):
    """A captured tensor in the hands of user code: it can be indexed, and nothing else."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self._tensor = tensor
        self.shape, self.ndim = shape, len(shape)

    def __getitem__(self, indices: object) -> Node:  # type: ignore[override]
        return load(self._tensor, indices if isinstance(indices, tuple) else (indices,))

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        fail(
            f"{self._tensor.name}.{name} is not in the language; a captured tensor can only be indexed: {self._example}"
        )

    @property
    def advice(self) -> str:
        """What to do instead of using the tensor as a number."""
        return f"{self._tensor.name} is a tensor and has to be indexed: {self._example}"

    @property
    def _example(self) -> str:
        return f"{self._tensor.name}[{', '.join('bhqk'[-self.ndim :] if self.ndim < 5 else 'bhqk')}]"


def load(tensor: Tensor, indices: tuple[object, ...]) -> Node:
    """An element of a captured tensor."""
    for index in indices:
        if isinstance(index, slice) or index is None or index is Ellipsis:
            fail(
                f"{tensor.name} takes one number per dimension and no slices, since a traced value is one number: "
                f"{tensor.name}[h]"
            )
    if len(indices) != tensor.rank:
        fail(f"{tensor.name} has {tensor.rank} dimensions and got {len(indices)} indices; give one for each")
    nodes = tuple(as_node(index) for index in indices)
    for number, node in enumerate(nodes):
        if node.type != "int":
            fail(
                f"index {number} of {tensor.name} is {article(node.type)}; an index must be a whole number, "
                "so use //, not /"
            )
        if isinstance(node, Const) and node.value < 0:
            fail(f"index {number} of {tensor.name} is {node.value}; indices count from 0 and not from the end")
    return Load(tensor, nodes)
