"""What makes a step of the one backward kernel for Hopper shorter: by the clock, and where registers allow it.

``packed``: dS is made of P as it was rounded for dV, two elements at a time, so that P's floats are needed no longer
than exponentials are. ``holds_keys``: K_j is the left operand of S from registers and not from shared memory, which has
most to do. ``dq_between``: dQ of the step before is multiplied between dV and dK of this one, and goes out while dK is
multiplied, so that a step begins with its scores. ``ahead``: what the next step's scores begin with is fetched while
this one's dK is multiplied. ``reads_ahead``: so is what a score reads for each pair, by neighbours, while the products
of its pairs are on their way.

Rates are TFLOP/s on an H200 by the launcher, bf16; research/ has all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flashgen.plan.captured.prefetch import MOST_BYTES_BACKWARD, loads_ahead_of
from flashgen.plan.expressions import expressions_of
from flashgen.plan.hopper.forward_traits import changes_scores, pair_loads
from flashgen.plan.hopper.units import PANEL, is_block_sparse
from flashgen.plan.model.budget import Held, registers_of
from flashgen.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Row:
    """The shortcuts that make a head_dim faster."""

    wanted: tuple[str, ...]
    reason: str


TABLE = {
    64: Row(
        ("packed", "reads_ahead", "dq_between", "ahead"),
        "dQ between dV and dK, for which K_j gives way, and scores ahead: 557 at 4,096, full, and 464, causal, beside "
        "551 and 453 with K_j in registers instead",
    ),
    96: Row(
        ("packed", "reads_ahead", "holds_keys", "dq_between"),
        "dQ between dV and dK, and K_j in registers: for both there is room. 514 beside 482 at 4,096, full, and 464 "
        "beside 442, causal, with K_j alone",
    ),
    128: Row(
        ("packed", "reads_ahead", "dq_between"),
        "dQ between dV and dK: 594 at 4,096, full, and 525, causal, beside 526 and 499 with half of K_j in registers "
        "instead; with the next step's scores ahead as well it lost 1 to 3 % in another run",
    ),
}
#: What a score takes besides that reads something for each pair as it comes.
_ADDRESSES_OF_PAIRS = 16
_KEPT = "P's floats have their registers until dS is made"
_NAMES = {
    "packed": "packed dS",
    "reads_ahead": "biases ahead",
    "holds_keys": "K_j in registers",
    "dq_between": "dQ between dV and dK",
    "ahead": "the next step's scores ahead",
}


def held(spec: AttentionSpec, tile_q: int, switches: Collection[str]) -> Held:
    """The registers of a consumer's thread."""
    # Of P rounded sparing consumers have three parts of four: two are multiplied when the third is rounded. If P's
    # floats are needed no longer, what is rounded takes their place, but for what is on its way.
    rounded = tile_q // 8 if "packed" in switches else tile_q // 4 * 3 // 4 if "sparing" in switches else tile_q // 4
    # dQ has the place of P's floats, which are rounded by then, all of them.
    between = "dq_between" in switches
    # What a score has read of each pair goes as P is made of it.
    reads = "reads_ahead" in switches
    made = max(rounded, tile_q // 4) if reads or (between and tile_q == 64) else rounded
    return (
        ("dK", spec.head_dim // 2),
        ("dV", spec.head_dim_v // 2),
        ("S or dQ", max(tile_q // 2, PANEL // 2)) if between else ("S", tile_q // 2),
        ("dP", tile_q // 2),
        ("P rounded or biases" if reads else "P rounded", made),
        *((("K_j", spec.head_dim // 4),) if "holds_keys" in switches else ()),
        # Those of dS that goes while other dS comes, too.
        ("addresses", 28 if between else 16),
    )


def shortcuts(spec: AttentionSpec, tile_q: int, most: int) -> tuple[frozenset[str], tuple[str, ...]]:
    """Which are taken where a consumer's threads have at most so many registers, and why those and no others."""
    row = TABLE.get(spec.head_dim)
    if row is None:
        return frozenset(), ()
    taken: set[str] = set()
    notes = [row.reason]
    for name in row.wanted:
        fault = _fault(name, spec, tile_q, taken, most)
        if fault is None:
            taken.add(name)
        elif fault:
            notes.append(f"not {_NAMES[name]}: {fault}")
    return frozenset(taken), tuple(notes)


def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether the score reads two bytes for each pair that can be fetched ahead."""
    if not changes_scores(spec) or spec.score is None or not spec.score.traced.tensors:
        return False
    return bool(loads_ahead_of(expressions_of(spec), MOST_BYTES_BACKWARD))


def is_sparing(spec: AttentionSpec, tile_q: int, taken: Collection[str]) -> bool:
    """Whether few parts of dV are under way at once, so that producers have registers for a mask that leaves holes.

    A score has all of P rounded at once, and if P's floats are needed no longer there are registers for both.
    """
    return tile_q == 128 and is_block_sparse(spec) and not changes_scores(spec) and "packed" not in taken


def masks_late(spec: AttentionSpec, tile_q: int, taken: Collection[str]) -> bool:
    """Whether pairs are asked whether they are allowed after the exponentials that a score changes and not before:
    with 128 queries there are no registers for the answers meanwhile.

    What a score reads of each pair is on its way then, and the question would be in between.
    """
    crowded = tile_q == 128 and changes_scores(spec) and "packed" not in taken
    return crowded and not spec.mask.is_full and not pair_loads(spec)


def _fault(name: str, spec: AttentionSpec, tile_q: int, taken: Collection[str], most: int) -> str | None:
    """Why a shortcut cannot be taken, given those that are; nothing to tell where there is nothing to be had."""
    if name == "packed":
        return _why_not_packed(spec, tile_q)
    if name == "ahead":
        return _why_not_ahead(spec, taken)
    if name == "dq_between" and "packed" not in taken:
        return _KEPT
    if name == "reads_ahead" and not reads_pairs(spec):
        return ""
    if name == "reads_ahead" and is_block_sparse(spec):
        return "a mask that leaves holes has use for the registers"
    if name == "holds_keys" and pair_loads(spec) and not (spec.score and spec.score.only_adds):
        return "what the score reads, and its slope, need the registers"
    registers = registers_of(held(spec, tile_q, {*taken, name}))
    reads_late = name == "holds_keys" and "reads_ahead" not in taken
    crowded = name == "dq_between" and (not spec.mask.is_full or "holds_keys" in taken)
    if pair_loads(spec) and (reads_late or crowded):
        registers += _ADDRESSES_OF_PAIRS
    return f"{registers} registers, and there are {most}" if registers > most else None


def _why_not_packed(spec: AttentionSpec, tile_q: int) -> str | None:
    # Two elements are multiplied as numbers of their own type, and bf16 has the exponents of float32. So the product
    # of two rounded factors is at most three roundings from P (dP - D), relative to that, however small P is and
    # however large dP - D. P is at most 1: a product is too large for bf16 only if dP - D is, by less than a rounding
    # of the largest number. Below the smallest normal number dS loses bits in any case. In fp16 a P below 2**-14, as
    # where many keys share a row, has lost bits that P (dP - D) would have, and a dP - D above 65504 is infinite, of
    # which a P of 0 makes no number.
    if spec.dtype != "bf16":
        return f"a small P has lost bits in {spec.dtype}, and a large dP - D is infinite"
    if spec.score is not None and not spec.score.only_adds:
        return "dS has the slope of the score for a factor besides, and dV has not"
    # P's floats of 128 queries take more registers than evaluating the mask for tiles.
    if pair_loads(spec) and (not reads_pairs(spec) or (is_block_sparse(spec) and tile_q < 128)):
        return "what the score reads for each pair needs the registers"
    return None


def _why_not_ahead(spec: AttentionSpec, taken: Collection[str]) -> str | None:
    if "packed" not in taken:
        return _KEPT
    if changes_scores(spec):
        return "scores that a score changes begin with zeros, which take no time to come"
    return None
