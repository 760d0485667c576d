"""A tree together with the values that it captured; two of them combine into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen.errors import TraceError
from flashgen.expr.readings.numpy import evaluate
from flashgen.expr.trace.capture import clean_name, element_type
from flashgen.expr.tree.build import binary, unary
from flashgen.expr.tree.nodes import Binary, Const, Load, Node, Scalar, Score, Tensor
from flashgen.expr.tree.rebuild import substitute
from flashgen.expr.tree.text import text
from flashgen.expr.tree.visit import postorder

MAX_NODES = 256
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A mask or score: the tree, and the values of its captured numbers and tensors by name."""

    root: Node
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """The identity: code and captured numbers. Tensors count by name and element type."""
        scalars = sorted((name, type(value).__name__, value) for name, value in self.scalars.items())
        tensors = sorted((name, element_type(value)) for name, value in self.tensors.items())
        return self.root, tuple(scalars), tuple(tensors)

    def plain(self) -> tuple[object, ...]:
        """The code as text, and the types of what it captured: all but the values."""
        scalars = sorted((name, type(value).__name__) for name, value in self.scalars.items())
        tensors = sorted((name, element_type(value), len(value.shape)) for name, value in self.tensors.items())
        return text(self.root), tuple(scalars), tuple(tensors)

    def __and__(self, other: Traced) -> Traced:
        return self._with("&", other)

    def __or__(self, other: Traced) -> Traced:
        return self._with("|", other)

    def __invert__(self) -> Traced:
        return with_used(unary("~", self.root), self.scalars, self.tensors)

    def then(self, outer: Traced) -> Traced:
        """The score that applies ``outer`` to the result of this one."""
        outer = outer.renamed(self)
        root = substitute(outer.root, {Score(): self.root})
        return with_used(root, {**self.scalars, **outer.scalars}, {**self.tensors, **outer.tensors})

    def renamed(self, other: Traced) -> Traced:
        """The same with names that do not clash with the other's; what both captured keeps one name."""
        theirs = {**other.scalars, **other.tensors}
        taken = {*theirs, *self.scalars, *self.tensors}
        names: dict[str, str] = {}
        for name, value in {**self.scalars, **self.tensors}.items():
            shared = next((n for n, v in other.tensors.items() if v is value), None) if name in self.tensors else None
            if shared is not None:
                names[name] = shared
            elif name in theirs and not (name in self.scalars and _same_number(theirs[name], value)):
                names[name] = clean_name(name, taken)
                taken.add(names[name])
        if not names:
            return self
        return with_used(
            _with_names(self.root, names),
            {names.get(name, name): value for name, value in self.scalars.items()},
            {names.get(name, name): value for name, value in self.tensors.items()},
        )

    def _with(self, op: str, other: Traced) -> Traced:
        other = other.renamed(self)
        return with_used(
            binary(op, self.root, other.root),
            {**self.scalars, **other.scalars},
            {**self.tensors, **other.tensors},
        )


def with_used(root: Node, scalars: Mapping[str, int | float], tensors: Mapping[str, Any]) -> Traced:
    """The tree with only the captured values that it still uses after simplification."""
    used = {n.name if isinstance(n, Scalar) else n.tensor.name for n in postorder(root) if isinstance(n, Scalar | Load)}
    return Traced(
        root,
        {name: value for name, value in scalars.items() if name in used},
        {name: value for name, value in tensors.items() if name in used},
    )


def check_counts(root: Node, scalars: Mapping[str, int | float]) -> None:
    """TraceError when captured numbers make the count of a shift negative."""
    for node in postorder(root):
        if not isinstance(node, Binary) or node.op not in ("<<", ">>"):
            continue
        leaves = [x for x in postorder(node.right) if not x.children]
        if all(isinstance(x, Const | Scalar) for x in leaves) and (count := int(evaluate(node.right, scalars))) < 0:
            raise TraceError(
                f"{text(node)} shifts by {count}, and a shift count is not negative; capture another number, "
                "or shift the other way"
            )


def _same_number(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _with_names(root: Node, names: Mapping[str, str]) -> Node:
    done: dict[Node, Node] = {}
    for node in postorder(root):
        if isinstance(node, Scalar) and node.name in names:
            done[node] = Scalar(names[node.name], node.type)
        elif isinstance(node, Load) and node.tensor.name in names:
            tensor = Tensor(names[node.tensor.name], node.tensor.type, node.tensor.rank)
            # Loads are leaves to what stands above them, so their indices are renamed here.
            done[node] = Load(tensor, tuple(substitute(index, done) for index in node.indices))
    return substitute(root, done)


def check_size(root: Node, what: str) -> None:
    """TraceError when a tree is larger than a kernel should evaluate for every pair."""
    count = len(postorder(root))
    if count > MAX_NODES:
        raise TraceError(
            f"{what} has {count} operations and values; at most {MAX_NODES} are allowed: "
            "put what does not depend on both q and k into a tensor, and index that"
        )
    if root.depth > MAX_DEPTH:
        raise TraceError(
            f"{what} is nested {root.depth} deep; at most {MAX_DEPTH} are allowed: "
            "combine terms pairwise, (a + b) + (c + d), or use a loop-free formula"
        )
