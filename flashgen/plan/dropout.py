"""What dropout adds to the kernels of a spec that has it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.plans import KernelPlan, Param, ParamTable

#: Numbers that each call brings, as it brings addresses.
NUMBERS = ("dropout_seed", "dropout_offset")
#: Where a kernel finds them instead, if that is not null.
STATE = "dropout_state"
_PARAMS = (
    Param(STATE, "void*", "const u64*", "seed and offset in memory; null: the two below"),
    *(Param(name, "uint64", "u64") for name in NUMBERS),
    Param("dropout_below", "int32", "u32", "a pair is dropped if its 15-bit number is below this"),
    Param("dropout_factor", "float", "float", "1 / (1 - p)"),
)

#: Roles of kernels that go over pairs.
_DRAWING = ("forward", "main", "query", "ds", "dv", "captured_pairs")


def with_dropout(kernel: KernelPlan) -> KernelPlan:
    """The kernel, drawing which pairs are dropped if it goes over pairs."""
    draws = kernel.role in _DRAWING or kernel.role.startswith("captured_tile")
    if not (kernel.spec.dropout and draws):
        return kernel
    params = ParamTable.widest_first((*kernel.params.params, *_PARAMS))
    return replace(kernel, params=params, switches=kernel.switches | {"dropout"})
