"""Optional shortcuts in a step of the fused backward kernel for Hopper. Each is taken where registers allow it.

- ``packed_ds``: dS = P (dP - D) uses P as rounded for dV, two elements at a time. P's floats die with the exponentials.
- ``k_in_registers``: K_j is the left operand of S from registers. Shared memory is the busiest unit.
- ``dq_mid_step``: the previous step's dQ is multiplied between dV and dK, and stored while dK is multiplied.
- ``early_scores``: the accumulators of the next step's scores are initialized while dK is multiplied.
- ``prefetches_bias``: the elements that a score loads for each pair are loaded while S is multiplied.

Rates are TFLOP/s on an H200 by the launcher, bf16; research/ has all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flashgen.plan.captured.prefetch import MAX_PREFETCH_BYTES_BACKWARD, prefetched_loads_of
from flashgen.plan.expressions import expressions_of
from flashgen.plan.hopper.forward_traits import changes_scores, score_loads_per_pair
from flashgen.plan.hopper.units import PANEL, is_block_sparse
from flashgen.plan.model.budget import Held, registers_of
from flashgen.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Row:
    """The shortcuts that make a head_dim faster, in order of gain."""

    wanted: tuple[str, ...]
    reason: str


TABLE = {
    64: Row(
        ("packed_ds", "prefetches_bias", "dq_mid_step", "early_scores"),
        "dQ between dV and dK, for which K_j gives way, and scores ahead: 557 at 4,096, full, and 464, causal, beside "
        "551 and 453 with K_j in registers instead",
    ),
    96: Row(
        ("packed_ds", "prefetches_bias", "k_in_registers", "dq_mid_step"),
        "dQ between dV and dK, and K_j in registers: for both there is room. 514 beside 482 at 4,096, full, and 464 "
        "beside 442, causal, with K_j alone",
    ),
    128: Row(
        ("packed_ds", "prefetches_bias", "dq_mid_step"),
        "dQ between dV and dK: 594 at 4,096, full, and 525, causal, beside 526 and 499 with half of K_j in registers "
        "instead; with the next step's scores ahead as well it lost 1 to 3 % in another run",
    ),
}
#: Registers for addresses, if a score loads an element for each pair just before use.
_PAIR_ADDRESS_REGISTERS = 16
_P_STAYS_FLOAT = "P's floats keep their registers until dS is computed"
_NAMES = {
    "packed_ds": "packed dS",
    "prefetches_bias": "biases ahead",
    "k_in_registers": "K_j in registers",
    "dq_mid_step": "dQ between dV and dK",
    "early_scores": "the next step's scores ahead",
}


def held(spec: AttentionSpec, tile_q: int, switches: Collection[str]) -> Held:
    """What the registers of a consumer thread hold."""
    # With few products of dV in flight three quarters of rounded P are live. With packed dS rounded P takes the place
    # of P's floats, except for the part that products still read.
    rounded = (
        tile_q // 8
        if "packed_ds" in switches
        else tile_q // 4 * 3 // 4
        if "few_dv_in_flight" in switches
        else tile_q // 4
    )
    # dQ takes the registers of P's floats, which are all rounded by then.
    between = "dq_mid_step" in switches
    # A prefetched element dies when P of its pair is computed.
    reads = "prefetches_bias" in switches
    made = max(rounded, tile_q // 4) if reads or (between and tile_q == 64) else rounded
    return (
        ("dK", spec.head_dim // 2),
        ("dV", spec.head_dim_v // 2),
        ("S or dQ", max(tile_q // 2, PANEL // 2)) if between else ("S", tile_q // 2),
        ("dP", tile_q // 2),
        ("P rounded or biases" if reads else "P rounded", made),
        *((("K_j", spec.head_dim // 4),) if "k_in_registers" in switches else ()),
        # With dq_mid_step the addresses of two slots of dS are live.
        ("addresses", 28 if between else 16),
    )


def shortcuts(spec: AttentionSpec, tile_q: int, most: int) -> tuple[frozenset[str], tuple[str, ...]]:
    """The shortcuts to take if a consumer thread has at most ``most`` registers, and notes that say why."""
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
    """Whether the score loads two bytes for each pair that can be prefetched."""
    if not changes_scores(spec) or spec.score is None or not spec.score.traced.tensors:
        return False
    return bool(prefetched_loads_of(expressions_of(spec), MAX_PREFETCH_BYTES_BACKWARD))


def is_sparing(spec: AttentionSpec, tile_q: int, taken: Collection[str]) -> bool:
    """Whether to keep few products of dV in flight, which leaves the producer registers for a block-sparse mask.

    A score needs all of rounded P at once. With packed dS there are registers anyway.
    """
    return tile_q == 128 and is_block_sparse(spec) and not changes_scores(spec) and "packed_ds" not in taken


def masks_late(spec: AttentionSpec, tile_q: int, taken: Collection[str]) -> bool:
    """Whether the mask is applied after the exponentials, not before: with a score and 128 queries no registers are
    left to keep the mask bits meanwhile.

    Not if the score loads an element for each pair: those loads are in flight then.
    """
    crowded = tile_q == 128 and changes_scores(spec) and "packed_ds" not in taken
    return crowded and not spec.mask.is_full and not score_loads_per_pair(spec)


def _fault(name: str, spec: AttentionSpec, tile_q: int, taken: Collection[str], most: int) -> str | None:
    """Why a shortcut cannot be taken beside those already taken; "" if it does not apply; None if it can."""
    if name == "packed_ds":
        return _why_not_packed(spec, tile_q)
    if name == "early_scores":
        return _why_not_ahead(spec, taken)
    if name == "dq_mid_step" and "packed_ds" not in taken:
        return _P_STAYS_FLOAT
    if name == "prefetches_bias" and not reads_pairs(spec):
        return ""
    if name == "prefetches_bias" and is_block_sparse(spec):
        return "a block-sparse mask needs the registers"
    if name == "k_in_registers" and score_loads_per_pair(spec) and not (spec.score and spec.score.only_adds):
        return "the elements that the score loads, and its slope, need the registers"
    registers = registers_of(held(spec, tile_q, {*taken, name}))
    reads_late = name == "k_in_registers" and "prefetches_bias" not in taken
    crowded = name == "dq_mid_step" and (not spec.mask.is_full or "k_in_registers" in taken)
    if score_loads_per_pair(spec) and (reads_late or crowded):
        registers += _PAIR_ADDRESS_REGISTERS
    return f"{registers} registers, and there are {most}" if registers > most else None


def _why_not_packed(spec: AttentionSpec, tile_q: int) -> str | None:
    # The packed product is computed in the element type. bf16 has float32's exponent range, so the product of two
    # rounded factors is within three roundings of P (dP - D). P <= 1, so it overflows only if dP - D does. In fp16 a P
    # below 2**-14 (many keys in a row) is subnormal and loses bits, and dP - D above 65504 is infinite, so 0 * inf
    # would be NaN.
    if spec.dtype != "bf16":
        return f"a small P has lost bits in {spec.dtype}, and a large dP - D is infinite"
    if spec.score is not None and not spec.score.only_adds:
        return "dS has the slope of the score as a further factor, and dV does not"
    # For 128 queries, P's floats take more registers than evaluating the mask for tiles.
    if score_loads_per_pair(spec) and (not reads_pairs(spec) or (is_block_sparse(spec) and tile_q < 128)):
        return "the elements that the score loads for each pair need the registers"
    return None


def _why_not_ahead(spec: AttentionSpec, taken: Collection[str]) -> str | None:
    if "packed_ds" not in taken:
        return _P_STAYS_FLOAT
    if changes_scores(spec):
        return "with a score the accumulators start at zero, which takes no loads"
    return None
