"""What packed sequences add to the kernels of a spec that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from flashgen.plan.model.plans import KernelPlan, Param, ParamTable

#: Arrays that say where sequences begin and how much of each is used; of the latter there may be none.
STARTS = ("cu_seqlens_q", "cu_seqlens_k")
COUNTS = ("seqused_q", "seqused_k")
_NOTES = {
    "cu_seqlens_q": "where the queries of each sequence begin, and where the last one's end",
    "seqused_q": "how many of them are used; null: all",
}
_PARAMS = (
    *(Param(name, "void*", "const i32*", _NOTES.get(name, "")) for name in (*STARTS, *COUNTS)),
    Param("total_q", "int64", "i64", "queries of all sequences"),
    Param(
        "corner_lower", "int32", "i32", "the band of terms aligned top-left; band_... is for those aligned bottom-right"
    ),
    Param("corner_upper", "int32", "i32"),
)
#: A scheduler on the device counts the tiles of each sequence.
_SEQUENCES = Param("batch", "int32", "i32", "sequences")
_LENGTHS = (Param("len_q", "int32", "i32", "of the longest sequence"), Param("len_kv", "int32", "i32"))
#: Tensors of which the backward kernels for Hopper copy boxes that end with their sequence: the side of their rows.
_WINDOWS: Mapping[str, Literal["q", "kv"]] = {
    "q": "q",
    "dout": "q",
    "dq": "q",
    "k": "kv",
    "v": "kv",
    "dk": "kv",
    "dv": "kv",
}
_CHANGED_NOTES = {
    "len_q": "of the longest sequence",
    "band_lower": "relative to the diagonal through the last query and the last key",
}
_ROW_NOTES = {"lse": "log-sum-exp, (heads_q, total_q)", "dsum": "D = rowsum(dO * O), (heads_q, total_q)"}


def with_varlen(kernel: KernelPlan) -> KernelPlan:
    """The kernel, finding the rows of its sequence among those of all."""
    if not kernel.spec.varlen or kernel.fixed_blocks is not None:
        return kernel
    notes = _CHANGED_NOTES | _ROW_NOTES
    own = [replace(p, note=notes.get(p.name, p.note)) for p in kernel.params.params]
    more = (*_LENGTHS, _SEQUENCES) if kernel.is_persistent or kernel.role == "repair" else _LENGTHS
    missing = [p for p in more if p.name not in kernel.params.names]
    params = ParamTable.widest_first((*own, *missing, *_PARAMS))
    boxes = (
        kernel.boxes
        if kernel.pass_ == "forward"
        else tuple(replace(b, window=_WINDOWS.get(b.tensor)) for b in kernel.boxes)
    )
    return replace(kernel, params=params, boxes=boxes)
