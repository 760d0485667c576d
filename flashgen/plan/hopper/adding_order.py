"""The order in which tiles of keys add to dQ with ``deterministic=True``.

Rates are TFLOP/s on an H200 by the launcher, bf16 and head_dim 128; research/ has all of them.
"""

from __future__ import annotations

from flashgen.plan.model.plans import Constant
from flashgen.spec import AttentionSpec

#: Tiles of keys in a group. Groups alternate between descending and ascending order.
_GROUP = 8
_REASON = (
    f"tiles of keys add in groups of {_GROUP}, as many as run on a head at once, alternately down and up: "
    "482 / 525 / 555 at 4,096 / 8,192 / 16,384, causal, beside 481 / 517 / 545 in groups of 16 "
    "and 477 / 514 / 546 from first to last"
)


def goes_in_groups(spec: AttentionSpec) -> bool:
    """Whether tiles of keys add in groups rather than from the first to the last.

    This needs a causal mask: every query that attends to a tile of keys then attends to all tiles before it.
    """
    mask = spec.mask
    return spec.deterministic and mask.is_band and mask.has_upper and not mask.has_lower


def order_constants(spec: AttentionSpec) -> tuple[Constant, ...]:
    """The constant that names the group size, if there are groups."""
    group = Constant("order_group", _GROUP, "tiles of keys in a group; groups alternate in direction")
    return (group,) if goes_in_groups(spec) else ()


def order_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """A sentence for the plan's printout."""
    return (_REASON,) if goes_in_groups(spec) else ()
