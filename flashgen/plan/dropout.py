"""What dropout adds to the kernels of a spec that has it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.plans import KernelPlan, Param, ParamTable

#: Numbers that each call brings, as it brings addresses.
NUMBERS = ("dropout_seed", "dropout_offset")
#: Where a kernel finds them instead, if that is not null.
STATE = "dropout_state"
_FACTOR = Param("dropout_factor", "float", "float", "1 / (1 - p)")
_PARAMS = (
    Param(STATE, "void*", "const u64*", "seed and offset in memory; null: the two below"),
    *(Param(name, "uint64", "u64") for name in NUMBERS),
    Param("dropout_below", "int32", "u32", "a pair is dropped if its 15-bit number is below this"),
    _FACTOR,
)

#: Roles of kernels that go over pairs.
_DRAWING = ("forward", "main", "query", "repair", "ds", "dv", "captured_pairs")


def with_dropout(kernel: KernelPlan) -> KernelPlan:
    """The kernel, drawing which pairs are dropped if it goes over pairs."""
    if not kernel.spec.dropout:
        return kernel
    more: tuple[Param, ...] = ()
    if kernel.role in _DRAWING or kernel.role.startswith("captured_tile"):
        more = _PARAMS
    elif "row_stats" in kernel.params.names:
        # Where accumulators of dP start depends on how much pairs that are kept count.
        more = (_FACTOR,)
    if not more:
        return kernel
    return replace(kernel, params=ParamTable.widest_first((*kernel.params.params, *more)))
