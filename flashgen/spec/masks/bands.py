"""Between bands and expressions: a band as a condition on b, h, q and k, and the bounds of one that is a band."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from flashgen.expr import Const, Index, Length, Node, Scalar, TileRule, Traced, evaluate, tile_rule
from flashgen.spec.masks.band import Band

#: Farther than any key, with room for a length to be added in 32 bits.
_FAR = 2**30


def band_expression(bottom_right: Band, top_left: Band) -> Traced:
    """The pairs that both bands allow; the widths are captured numbers, so that all windows are one kernel."""
    aligned = Length("k_len") - Length("q_len")
    return _expression(bottom_right, aligned) & _expression(top_left, Const(0))


def _expression(band: Band, origin: Node) -> Traced:
    whole = Traced(Const(True))
    distance = Index("k") - Index("q")
    if band.right == 0:  # causal is worth reading as such: the 0 is part of it, no width
        whole = whole & Traced(distance <= origin)
    elif band.right is not None:
        whole = whole & Traced(distance <= origin + Scalar("right", "int"), {"right": min(band.right, _FAR)})
    if band.left is not None:
        whole = whole & Traced(distance >= origin - Scalar("left", "int"), {"left": min(band.left, _FAR)})
    return whole


@lru_cache(maxsize=1024)
def rule_of(root: Node) -> TileRule:
    """The tile rule of a mask's tree."""
    return tile_rule(root)


def band_bounds(rule: TileRule, scalars: Mapping[str, int | float], len_q: int, len_kv: int) -> tuple[int, int]:
    """The least and greatest ``k - q`` that a band allows for these lengths."""
    env = {**scalars, "q_len": len_q, "k_len": len_kv}
    lower, upper = -len_q, len_kv
    if rule.band is not None and rule.band.lower is not None:
        lower = int(evaluate(rule.band.lower, env))
    if rule.band is not None and rule.band.upper is not None:
        upper = int(evaluate(rule.band.upper, env))
    return lower, upper
