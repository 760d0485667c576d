"""Nodes that only the scores of kernels have, where a pair is given by its distance from another one."""

# ruff: noqa: D102 (a node is made by __new__, and the class says what of)
from __future__ import annotations

from flashgen.expr.tree.nodes import USES, Node, make, nodes


class Step(Node):
    """How many queries below, or keys to the right of, the first pair this one is; ``index`` is ``q`` or ``k``."""

    __slots__ = ("index",)
    _fields = ("index",)
    index: str

    def __new__(cls, index: str) -> Step:
        key = (cls, index)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "int", (), USES[index], index=index)

    @property
    def name(self) -> str:
        """A name that no captured value can have."""
        return f"step.{self.index}"


class Start(Node):
    """A whole number, as it is at the first pair, turned into a float; ``first.<its name>``."""

    __slots__ = ("name",)
    _fields = ("name",)
    name: str

    def __new__(cls, name: str) -> Start:
        key = (cls, name)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "float", (), USES["q"] | USES["k"], name=name)
