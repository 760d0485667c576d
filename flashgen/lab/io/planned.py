"""What the kernels of a plan move, from their tiles, passes and workspaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flashgen.dtypes import DTYPES
from flashgen.lab.io import decode, flash, lineage, standard
from flashgen.lab.io.names import shown
from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes, tile_of
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO
from flashgen.plan import workspaces
from flashgen.plan.cache import PREFILL
from flashgen.plan.calls import PHASES
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Pass, Role

_Model = Callable[[Sizes, AttentionPlan, KernelPlan], KernelIO]
#: The kernels that write O, by template; all others are FlashAttention-2's or 3's.
_FORWARD: dict[str, _Model] = {
    "lineage/naive.cu.j2": lineage.naive,
    "lineage/grid1d.cu.j2": lineage.grid1d,
    "lineage/grid2d.cu.j2": lineage.grid2d,
    "lineage/fa1.cu.j2": lineage.fa1,
    "lineage/standard_rows.cu.j2": standard.rows,
}
_BY_ROLE: dict[Role, _Model] = {
    "forward": flash.forward,
    PREFILL: flash.forward,
    "decode": decode.forward,
    "prepare": flash.prepare,
    "main": flash.main,
    "query": flash.query,
    "repair": flash.repair,
    "finish": flash.finish,
    "scores": standard.scores,
    "softmax": standard.softmax,
    "ds": standard.score_gradients,
    "dv": standard.columns,
    "dq": standard.rows,
    "dk": standard.columns,
    **dict.fromkeys(PHASES, lineage.grid2d),
}
_INEXACT = "loads of captured tensors and of their tables are left out"


def planned(name: str, sizes: Sizes, attention: AttentionPlan, roles: Sequence[Role], note: str) -> AlgorithmIO:
    """The row of the kernels that play ``roles``, in that order."""
    kernels = [attention.kernel(role) for role in roles]
    tiled = next((k for k in kernels if k.has_tiles and k.role != "prepare"), None)
    exact = not sizes.spec.tensors
    return AlgorithmIO(
        name,
        tuple(_model(kernel)(sizes, attention, kernel) for kernel in kernels),
        _stored(sizes, attention, roles),
        note if exact else f"{note}; {_INEXACT}",
        None if tiled is None else tile_of(tiled),
        exact=exact,
    )


def launched(
    attention: AttentionPlan,
    pass_: Pass,
    *,
    phased: bool = False,
    stored_p: bool = False,
    attending: Role | None = None,
) -> list[Role]:
    """The roles of the kernels that a call launches.

    ``phased``: a grid whose blocks do not all run at once takes several launches. ``stored_p``: the backward pass gets
    P from the forward pass; otherwise a plan that stores P computes it again. ``attending``: the kernel that reads the
    cache; by default ``forward``.
    """
    roles = [kernel.role for kernel in attention.kernels if kernel.pass_ == pass_ and kernel.role in _BY_ROLE]
    if pass_ == "backward":
        again = ["scores", "softmax"] if attention.stores_probabilities and not stored_p else []
        return again + roles
    if attention.spec.cache:
        return [attending or "forward"]
    if attention.has(PHASES[0]):
        return list(PHASES) if phased else ["forward"]
    return roles


def _model(kernel: KernelPlan) -> _Model:
    found = _BY_ROLE[kernel.role]
    return _FORWARD.get(kernel.template, found) if kernel.role == "forward" else found


def _stored(sizes: Sizes, attention: AttentionPlan, roles: Sequence[Role]) -> dict[str, int]:
    """Bytes of LSE or D, and of what kernels leave for others."""
    spec, backward = sizes.spec, sizes.pass_ == "backward"
    found = {"D" if backward else "LSE": sizes.row_floats}
    if backward:
        found |= {shown(name): FLOAT_BYTES * count for name, count in workspaces(attention, sizes.problem).items()}
    if "decode" in roles:
        kernel = attention.kernel("decode")
        floats = -(-spec.head_dim_v // 16) * 16 + 2
        found["parts"] = (
            FLOAT_BYTES * floats * 2 * decode.split_of(sizes, kernel).blocks * decode.part_rows(sizes, kernel)
        )
    for kernel in attention.kernels:
        runs = kernel.pass_ == sizes.pass_ or kernel.role in roles
        for workspace in kernel.workspaces:
            # A backward pass keeps P, wherever it comes from.
            if runs or workspace.name == "probabilities":
                count = math.prod(kernel.extents(workspace, sizes.problem))
                found[shown(workspace.name)] = count * DTYPES[workspace.dtype or spec.dtype].bytes
    return found
