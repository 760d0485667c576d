"""In which order the tiles of keys of a head add to dQ, where its sums are to be the same bits in every run.

Rates are TFLOP/s on an H200 by the launcher, bf16 and head_dim 128; research/ has all of them.
"""

from __future__ import annotations

from flashgen.plan.model.plans import Constant
from flashgen.spec import AttentionSpec

#: Tiles that go one way before as many go the other way.
_GROUP = 8
_REASON = (
    f"tiles of keys add in groups of {_GROUP}, as many as work on a head at once, down and up in turns: "
    "482 / 525 / 555 at 4,096 / 8,192 / 16,384, causal, beside 481 / 517 / 545 in groups of 16 "
    "and 477 / 514 / 546 from first to last"
)


def goes_in_groups(spec: AttentionSpec) -> bool:
    """Whether they go in groups, and not from the first to the last.

    That is for masks which make the first tiles the longest. All tiles before one then add where it does.
    """
    mask = spec.mask
    return spec.deterministic and mask.is_band and mask.has_upper and not mask.has_lower


def order_constants(spec: AttentionSpec) -> tuple[Constant, ...]:
    """The constant that names the group size, if there are groups."""
    group = Constant("order_group", _GROUP, "tiles of keys that add one way before as many add the other way")
    return (group,) if goes_in_groups(spec) else ()


def order_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """And people."""
    return (_REASON,) if goes_in_groups(spec) else ()
