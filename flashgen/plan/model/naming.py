"""Kernel names, e.g. ``forward_d128_causal_sm80``: what a reader needs to tell files apart."""

from __future__ import annotations

import hashlib

from flashgen.arch import Arch
from flashgen.plan.model.plans import Role
from flashgen.spec import AttentionSpec, Mask, causal

_STEMS: dict[Role, str] = {
    "forward": "forward",
    "scores": "forward_scores",
    "softmax": "forward_softmax",
    "prepare": "backward_prepare",
    "main": "backward_main",
    "query": "backward_query",
    "finish": "backward_finish",
    "survey": "survey",
    "append": "append",
    "prefill": "prefill",
    "decode": "decode",
    "combine": "combine",
    "quantize": "quantize",
    "clear_gaps": "clear_gaps",
    "grid_maxima": "grid_maxima",
    "grid_products": "grid_products",
    "grid_merge": "grid_merge",
}


def kernel_name(spec: AttentionSpec, role: Role, arch: Arch, *words: str) -> str:
    """The ``extern "C"`` symbol and file stem; ``words`` name a variant of the algorithm."""
    dims = f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}x{spec.head_dim_v}"
    stem = _STEMS.get(role, f"backward_{role}")
    parts = [stem, dims, spec.dtype if spec.dtype != "bf16" else "", _mask_word(spec.mask)]
    parts += [f"score{_digest(spec.score.plain())}" if spec.score is not None else "", *words]
    parts.append("varlen" if spec.varlen else "")
    parts.append({None: "", "contiguous": "cache", "paged": "pages"}[spec.cache])
    parts += [spec.cache_dtype or "", "scaled" if spec.page_scales else "", "qv" if spec.qv else ""]
    parts += ["to_fp16" if spec.out_dtype == "fp16" else "", f"scales{spec.scale_block}" if spec.scale_block else ""]
    parts.append("dropout" if spec.dropout and role not in ("prepare", "finish") else "")
    parts += ["deterministic" if spec.deterministic and role != "forward" else "", arch.name.replace("_", "")]
    return "_".join(p for p in parts if p)


def name_with(name: str, word: str) -> str:
    """The name of a kernel that takes the place of the named one, such as ``align8`` for less aligned arrays."""
    stem, _, arch = name.rpartition("_")
    return f"{stem}_{word}_{arch}"


def _digest(plain: object) -> str:
    """Enough of a digest to tell expressions apart. The values of captured numbers do not change it."""
    return hashlib.sha256(repr(plain).encode(), usedforsecurity=False).hexdigest()[:6]


def _mask_word(mask: Mask) -> str:
    if mask.is_full:
        return ""
    if mask.rest is not None:
        return f"mask{_digest(mask.plain())}"
    return "causal" if mask in (causal(), causal("top-left")) else "window"
