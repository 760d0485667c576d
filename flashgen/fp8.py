"""``fp8_attention``: attention in FP8 for 16-bit queries, keys and values, which are quantized first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flashgen.api import build
from flashgen.common.checks import is_one_of
from flashgen.common.show import show
from flashgen.dtypes import EIGHT_BIT_OUTPUTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import dtype_name
from flashgen.launch.arrays.frameworks import framework_of
from flashgen.launch.call.arguments import check_scale
from flashgen.spec import AttentionSpec, Mask, Score, Sequences, full
from flashgen.spec.attention import SCALE_BLOCKS

_LAYOUTS = ("bshd", "bhsd")
#: Heads up to so many elements have blocks of 128 rows; the tiles of wider heads have 64.
_NARROW = 128


def fp8_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    rotate: bool = True,
    block: int | None = None,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    sequences: Sequences | None = None,
) -> Any:
    """Attention in FP8: one kernel quantizes 16-bit q, k and v to e4m3, and one attends. For GPUs from sm_89.

    The arguments are those of ``attention``, and so is the result, in the dtype of q: float16 or bfloat16. Head
    dimensions are multiples of 16. ``rotate`` multiplies q and k by the same orthogonal matrix before they are rounded,
    which spreads outliers over the head and leaves the logits as they are. ``block`` rows, 64 or 128, share a scale;
    by default that is 128, or 64 for head dimensions above 128. There are no gradients.

    q, k and v are torch tensors, or arrays of another library; NumPy arrays run on the emulator.
    `When FP8 is safe <../explanation/fp8.md>`_ shows the errors.
    """
    if not is_one_of(layout, _LAYOUTS):
        raise ArgumentError(f"layout={show(layout)} is unknown; use 'bshd' or 'bhsd'")
    for name, flag in (("rotate", rotate), ("return_lse", return_lse)):
        if type(flag) is not bool:
            raise ArgumentError(f"{name}={show(flag)} is not a bool; use True or False")
    rank = 4 if sequences is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(getattr(x, "shape", ())) != rank:
            shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
            raise ArgumentError(f"{name} is a {type(x).__qualname__}{shape}; {_wanted(rank)}")
    if layout == "bhsd":
        q, k, v = _swapped(q), _swapped(k), _swapped(v)
    block = _block_of(block, max(q.shape[-1], v.shape[-1]))
    attend = _attend_torch if _is_torch(q) else _attend_arrays
    out, lse = attend(q, k, v, mask, score, scale, block, rotate, sequences)
    if layout == "bhsd":
        out = _swapped(out)
    return (out, lse) if return_lse else out


def _attend_torch(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score: Any,
    scale: float | None,
    block: int,
    rotate: bool,
    sequences: Sequences | None,
) -> tuple[Any, Any]:
    from flashgen.torch.mask_and_score import program_of
    from flashgen.torch.operators.quantized import QuantizedOptions, attend_quantized
    from flashgen.torch.options import check_dense
    from flashgen.torch.packed import check_sequences

    if sequences is not None:
        check_sequences(sequences)
    check_dense(q=q, k=k, v=v)
    program, captured = program_of(mask, score, q, k, sequences)
    return attend_quantized(q, k, v, program, captured, QuantizedOptions(block, scale, rotate, sequences))


def _attend_arrays(
    q: Any,
    k: Any,
    v: Any,
    mask: Mask | Callable[..., Any] | None,
    score: Score | Callable[..., Any] | None,
    scale: float | None,
    block: int,
    rotate: bool,
    sequences: Sequences | None,
) -> tuple[Any, Any]:
    framework, dtype = framework_of(q), dtype_name(str(q.dtype))
    if dtype not in EIGHT_BIT_OUTPUTS:
        raise ArgumentError(f"q is {dtype}; convert it: fp8_attention quantizes float16 and bfloat16")
    scale = None if scale is None else check_scale(scale)
    spec = AttentionSpec(
        q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype="e4m3",
        out_dtype=dtype,
        mask=full() if mask is None else mask,
        score=score,
        direction="forward",
        varlen=sequences is not None,
        scale_block=block,
    )
    kernel = build(spec, target="emulator" if framework.name == "NumPy" else "gpu")
    codes = kernel.quantize(q, k, v, rotate=rotate, sequences=sequences)
    scales = {name: getattr(codes, name) for name in ("q_scale", "k_scale", "v_scale")}
    out, lse = kernel(codes.q, codes.k, codes.v, scale=scale, sequences=sequences, **scales)
    return out, lse


def _block_of(block: object, head_dim: int) -> int:
    if block is None:
        return 128 if head_dim <= _NARROW else 64
    if isinstance(block, bool) or not isinstance(block, int) or block not in SCALE_BLOCKS:
        raise ArgumentError(f"block={show(block)} is not supported; use {' or '.join(map(str, SCALE_BLOCKS))} rows")
    return block


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _swapped(x: Any) -> Any:
    """Lengths and heads in each other's place; only torch's ``transpose`` swaps two dimensions."""
    return x.transpose(-3, -2) if _is_torch(x) else x.swapaxes(-3, -2)


def _wanted(rank: int) -> str:
    if rank == 4:
        return "pass arrays with 4 dimensions: (batch, length, heads, dim)"
    return "sequences are packed: pass arrays with 3 dimensions, (total length, heads, dim)"
