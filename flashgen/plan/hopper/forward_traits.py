"""Properties of expressions for the forward kernel for Hopper: where scores add, what they read, what masks compare."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashgen.plan.captured.load_dependence import over_of
from flashgen.plan.captured.prefetch import loads_ahead
from flashgen.plan.expressions import element_of
from flashgen.plan.hopper.units import is_block_sparse
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.expr import Load
    from flashgen.expr.analysis.key_orders import Orders

#: With up to this many words for the keys of a row, there are registers left.
_FEW_COMPARISONS = 2
#: The cost of a division of a value that differs from pair to pair, in operations.
_DIVISION = 4
#: As cap_shares.cuh has it of shares of low caps: all of them in few instructions, from the first to the second, and
#: exact ones in rows of any sums.
_LEAST_FINE_CAP, _FINE_CAP, _MODEST_CAP = 0.01, 50.0, 100.0


def is_in_products(spec: AttentionSpec) -> bool:
    """Whether the score adds to products what it would to logits."""
    if spec.score is None or not spec.score.changes_logits:
        return False
    from flashgen.expr import in_products

    return in_products(spec.score.traced.root) is not None


def changes_scores(spec: AttentionSpec) -> bool:
    """Whether there is a score that differs from its logit."""
    return spec.score is not None and spec.score.changes_logits


def is_capped(spec: AttentionSpec) -> bool:
    """Whether the score is a softcap and nothing else."""
    if spec.score is None or not spec.score.changes_logits:
        return False
    from flashgen.expr import cap_of

    return cap_of(spec.score.traced.root) is not None


def has_fine_cap(spec: AttentionSpec) -> bool:
    """Whether the cap is known to be so low that what shares of it are off by is nothing beside any logit, and not so
    low that there is no logit for what is forbidden."""
    return _LEAST_FINE_CAP <= _known_cap(spec) <= _FINE_CAP


def has_modest_cap(spec: AttentionSpec) -> bool:
    """Whether the cap is known to be so low that shares of it may be taken in rows of any sums, if exactly computed."""
    return _known_cap(spec) <= _MODEST_CAP and not has_fine_cap(spec)


def has_any_cap(spec: AttentionSpec) -> bool:
    """Whether the cap comes with a call."""
    return math.isinf(_known_cap(spec))


def _known_cap(spec: AttentionSpec) -> float:
    """The cap; infinity where it comes with a call."""
    from flashgen.expr import Const, Scalar, cap_of, evaluate, postorder

    assert spec.score is not None, "only a score caps"
    cap = cap_of(spec.score.traced.root)
    assert cap is not None, "asked of scores that cap"
    leaves = [node for node in postorder(cap.amplitude) if not node.children]
    if not all(isinstance(leaf, Const) or (isinstance(leaf, Scalar) and leaf.name in spec.scalars) for leaf in leaves):
        return math.inf
    return abs(float(evaluate(cap.amplitude, spec.scalars)))


def is_lean(spec: AttentionSpec) -> bool:
    """Whether the score leaves registers for tiles as wide as without it: it caps, or adds little to products."""
    if spec.score is None or not spec.score.changes_logits or is_capped(spec):
        return True
    from flashgen.expr.analysis.hoisting import is_light

    return is_in_products(spec) and is_light(spec.score.traced.root)


def compares_documents(spec: AttentionSpec) -> bool:
    """Whether the mask compares captured whole numbers along the sequence, by which its loops are bounded."""
    if not is_block_sparse(spec) or not spec.mask.traced.tensors:
        return False
    from flashgen.expr import Search, postorder

    rule = spec.mask.rule
    return any(isinstance(node, Search) for node in postorder(rule.key_begin, rule.key_end))


def looks_up_pairs(spec: AttentionSpec) -> bool:
    """Whether the mask reads something of captured tensors that depends on both the query and the key."""
    if not is_block_sparse(spec) or not spec.mask.traced.tensors:
        return False
    from flashgen.expr import Load, postorder

    loads = (node for node in postorder(spec.mask.traced.root) if isinstance(node, Load))
    return any(over_of(load.indices) in ("diagonals", "pairs") for load in loads)


def compares_little(spec: AttentionSpec) -> bool:
    """Whether at most two comparisons of keys are asked of a pair, and its logit stays as it is."""
    if changes_scores(spec):
        return False
    from flashgen.expr import Const
    from flashgen.expr.analysis.key_orders import leaves

    by_order = _orders(spec)
    return by_order.besides is Const(True) and len(leaves(by_order.ordered)) <= _FEW_COMPARISONS


def asked_of_pairs(spec: AttentionSpec) -> int:
    """How many operations the mask asks for of one pair after another, comparisons of keys beside them included.

    None where the order of keys is all, or whether two documents are the same.
    """
    if not is_block_sparse(spec):
        return 0
    from flashgen.expr import Const, postorder
    from flashgen.expr.analysis.key_orders import is_comparison_of_key, leaves
    from flashgen.expr.tree.nodes import USES, Binary

    by_order = _orders(spec)
    besides = by_order.besides
    if besides is Const(True) or (compares_documents(spec) and isinstance(besides, Binary) and besides.op == "=="):
        return 0
    asked = 0
    for node in postorder(besides):
        if not node.children or not node.uses & USES["k"]:
            continue
        # By a number of the call, it is a dozen instructions.
        divides = isinstance(node, Binary) and node.op in ("//", "%") and not isinstance(node.right, Const)
        asked += _DIVISION if divides and node.uses & USES["q"] else 1
    return asked + sum(is_comparison_of_key(leaf) for leaf in leaves(by_order.ordered))


def _orders(spec: AttentionSpec) -> Orders:
    from flashgen.expr import orders
    from flashgen.expr.analysis.hoisting import with_keys_apart

    return orders(with_keys_apart(spec.mask.traced.root))


def pair_loads(spec: AttentionSpec) -> tuple[Load, ...]:
    """What the score reads of captured tensors that depends on both the query and the key."""
    if spec.score is None or not spec.score.traced.tensors:
        return ()
    from flashgen.expr import Load, postorder

    loads = (node for node in postorder(spec.score.traced.root) if isinstance(node, Load))
    return tuple(load for load in loads if over_of(load.indices) in ("diagonals", "pairs"))


def all_ahead(spec: AttentionSpec, loads: tuple[Load, ...]) -> bool:
    """Whether all of these loads come before the products."""
    assert spec.score is not None, "only a score loads"
    return set(loads) <= set(loads_ahead(spec.score.traced.root, _elements(spec)))


def adds_two_bytes(spec: AttentionSpec, loads: tuple[Load, ...]) -> bool:
    """Whether they are one load of two bytes for each pair, and all that the score does is to add it."""
    from flashgen.expr import Scalar, Score
    from flashgen.expr.tree.build import binary
    from flashgen.expr.tree.rebuild import substitute

    assert spec.score is not None, "only a score loads"
    if len(loads) != 1 or _elements(spec)[loads[0].tensor.name] not in ("half_t", "bfloat16_t"):
        return False
    loaded = Scalar("loaded", "float")
    return substitute(spec.score.traced.root, {loads[0]: loaded}) in (
        binary("+", Score(), loaded),
        binary("+", loaded, Score()),
    )


def _elements(spec: AttentionSpec) -> dict[str, str]:
    """The C++ types of what the score has captured."""
    from flashgen.expr import element_type

    assert spec.score is not None, "only a score captures"
    return {name: element_of(name, element_type(value)) for name, value in spec.score.traced.tensors.items()}
