"""Properties of masks and scores by which the plan of Hopper's forward kernel chooses tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.plan.captured.load_dependence import over_of
from flashgen.plan.captured.prefetch import prefetched_loads
from flashgen.plan.expressions import element_of
from flashgen.plan.hopper.units import is_block_sparse
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.expr import Load
    from flashgen.expr.analysis.key_orders import Orders

#: Up to this many comparisons of keys per row, registers are left for wide tiles.
_MAX_KEY_COMPARISONS = 2
#: Operations that a division of a value that differs from pair to pair counts for.
_DIVISION_COST = 4


def is_in_products(spec: AttentionSpec) -> bool:
    """Whether the score can be applied to Q K^T before the scale: it only adds to its logit."""
    if spec.score is None or not spec.score.changes_logits:
        return False
    from flashgen.expr import in_products

    return in_products(spec.score.traced.root) is not None


def changes_scores(spec: AttentionSpec) -> bool:
    """Whether the score changes the logit at all."""
    return spec.score is not None and spec.score.changes_logits


def is_capped(spec: AttentionSpec) -> bool:
    """Whether the score is a softcap and nothing else."""
    if spec.score is None or not spec.score.changes_logits:
        return False
    from flashgen.expr import is_softcap

    return is_softcap(spec.score.traced.root)


def score_is_light(spec: AttentionSpec) -> bool:
    """Whether tiles can be as wide as without a score: a softcap, or a cheap addition to Q K^T."""
    if spec.score is None or not spec.score.changes_logits or is_capped(spec):
        return True
    from flashgen.expr.analysis.hoisting import is_light

    return is_in_products(spec) and is_light(spec.score.traced.root)


def compares_documents(spec: AttentionSpec) -> bool:
    """Whether the mask compares captured integers along the sequence, such as document ids, which bound its loops."""
    if not is_block_sparse(spec) or not spec.mask.traced.tensors:
        return False
    from flashgen.expr import Search, postorder

    rule = spec.mask.rule
    return any(isinstance(node, Search) for node in postorder(rule.key_begin, rule.key_end))


def mask_loads_per_pair(spec: AttentionSpec) -> bool:
    """Whether the mask loads an element that depends on both the query and the key."""
    if not is_block_sparse(spec) or not spec.mask.traced.tensors:
        return False
    from flashgen.expr import Load, postorder

    loads = (node for node in postorder(spec.mask.traced.root) if isinstance(node, Load))
    return any(over_of(load.indices) in ("diagonals", "pairs") for load in loads)


def compares_few_keys(spec: AttentionSpec) -> bool:
    """Whether the mask is at most two comparisons of the key, and no score changes the logit."""
    if changes_scores(spec):
        return False
    from flashgen.expr import Const
    from flashgen.expr.analysis.key_orders import leaves

    by_order = _orders(spec)
    return by_order.rest is Const(True) and len(leaves(by_order.ordered)) <= _MAX_KEY_COMPARISONS


def mask_ops_per_pair(spec: AttentionSpec) -> int:
    """Operations per pair to evaluate the mask, including comparisons of the key.

    0 if the mask only compares keys in order, or only tests whether two documents are the same.
    """
    if not is_block_sparse(spec):
        return 0
    from flashgen.expr import Const, postorder
    from flashgen.expr.analysis.key_orders import is_comparison_of_key, leaves
    from flashgen.expr.tree.nodes import USES, Binary

    by_order = _orders(spec)
    rest = by_order.rest
    if rest is Const(True) or (compares_documents(spec) and isinstance(rest, Binary) and rest.op == "=="):
        return 0
    asked = 0
    for node in postorder(rest):
        if not node.children or not node.uses & USES["k"]:
            continue
        # A divisor that is no constant takes a dozen instructions.
        divides = isinstance(node, Binary) and node.op in ("//", "%") and not isinstance(node.right, Const)
        asked += _DIVISION_COST if divides and node.uses & USES["q"] else 1
    return asked + sum(is_comparison_of_key(leaf) for leaf in leaves(by_order.ordered))


def _orders(spec: AttentionSpec) -> Orders:
    from flashgen.expr import orders
    from flashgen.expr.analysis.hoisting import with_keys_apart

    return orders(with_keys_apart(spec.mask.traced.root))


def score_loads_per_pair(spec: AttentionSpec) -> tuple[Load, ...]:
    """The score's loads that depend on both the query and the key."""
    if spec.score is None or not spec.score.traced.tensors:
        return ()
    from flashgen.expr import Load, postorder

    loads = (node for node in postorder(spec.score.traced.root) if isinstance(node, Load))
    return tuple(load for load in loads if over_of(load.indices) in ("diagonals", "pairs"))


def all_prefetched(spec: AttentionSpec, loads: tuple[Load, ...]) -> bool:
    """Whether all of these loads are issued before the products."""
    assert spec.score is not None, "only a score loads"
    return set(loads) <= set(prefetched_loads(spec.score.traced.root, _elements(spec)))


def is_16bit_bias(spec: AttentionSpec, loads: tuple[Load, ...]) -> bool:
    """Whether the score only adds one 16-bit element per pair."""
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
    """The C++ types of the score's captured tensors."""
    from flashgen.expr import element_type

    assert spec.score is not None, "only a score captures"
    return {name: element_of(name, element_type(value)) for name, value in spec.score.traced.tensors.items()}
