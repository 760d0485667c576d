"""``F.scaled_dot_product_attention`` for what torch's flash attention operators have no arguments for.

These are masks given as tensors, dropout, and tensors that torch's flash attention refuses: float32, causal masks of
other shapes than square, last strides other than 1. Calls without any of them continue to torch's operators, whose
names graphs and checkpoint policies rely on. Anything flashgen does not compute stays with torch, and so do errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from flashgen.launch.call.prepared import MAX_GRID
from flashgen.torch.entry import attend
from flashgen.torch.kernels import is_emulating, is_planned
from flashgen.torch.options import Options
from flashgen.torch.program import FULL, Program
from flashgen.torch.sdpa.forms import axes_of
from flashgen.torch.sdpa.mask_tensors import mask_program
from flashgen.torch.tensors import wants_gradients

LARGEST_HEAD = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOP_LEFT = Program((None, None, None, 0))
#: Plain tensors, and what stands for them while torch.compile and export record. Other subclasses, such as DTensor,
#: have rules of their own for torch's operators.
_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
_FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
_MOST_HEADS = min(MAX_GRID)


def scaled_dot_product_attention(
    otherwise: Callable[[], Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's function; ``otherwise`` calls torch's own implementation."""
    if not _may_take(query, key, value, attn_mask, dropout_p, is_causal):
        return otherwise()
    plain = attn_mask is None and dropout_p == 0.0
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if plain and torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, **options) == _FLASH:
        return otherwise()
    whole = _whole(query, key, value, enable_gqa)
    if whole is None:
        return otherwise()
    batch, q, k, v = whole
    mask = None if attn_mask is None else _whole_mask(attn_mask, batch, (*q.shape[:3], k.shape[2]))
    if mask is None and attn_mask is not None:
        return otherwise()
    out = _attend(q, k, v, mask, dropout_p, is_causal, scale)
    if out is None:
        return otherwise()
    return out if query.dim() == 4 else out.reshape(*batch, *out.shape[1:])[(0,) * (4 - query.dim())]


def _may_take(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool) -> bool:
    """Whether flashgen may see such tensors at all, and computes in their element types."""
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and all(type(x) in _TYPES and x.layout is torch.strided and x.device == q.device for x in tensors)
        and (q.is_cuda or (is_emulating() and q.device.type == "cpu"))
        and q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and (mask is None or (not is_causal and mask.dtype in (torch.bool, torch.float32, q.dtype)))
        and (mask is None or mask.dim() <= q.dim())
        and 0.0 <= dropout_p < 1.0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _whole(q: Any, k: Any, v: Any, enable_gqa: bool) -> tuple[tuple[int, ...], Any, Any, Any] | None:
    """The batch dimensions, and q, k and v as (batch, heads, length, head dim); None where only torch can decide."""
    if not q.dim() == k.dim() == v.dim() >= 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return None
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD or any(0 in x.shape for x in (q, k, v)):
        return None
    tensors = [_lifted(x) for x in (q, k, v)]
    heads = [x.shape[-3] for x in tensors]
    try:
        batch = _broadcast(*(x.shape[:-3] for x in tensors))
        if not enable_gqa:
            most = _broadcast(*((n,) for n in heads))[0]
            # Kernels share one head of keys and values between all heads of queries by themselves.
            heads = [most, *(heads[1:] if heads[1] == heads[2] else [most, most])]
    except RuntimeError:
        return None
    if heads[1] != heads[2] or heads[0] % heads[1] or max(math.prod(batch), heads[0]) > _MOST_HEADS:
        return None
    q, k, v = (_expanded(x, (*batch, n)) for x, n in zip(tensors, heads, strict=True))
    return batch, q, k, v


def _lifted(x: Any) -> Any:
    """The tensor with four dimensions at least."""
    return x if x.dim() > 3 else x[(None,) * (4 - x.dim())]


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """``torch.broadcast_shapes``, which takes longer than the rest where all are the same."""
    return shapes[0] if shapes[0] == shapes[1] == shapes[2] else torch.broadcast_shapes(*shapes)


def _expanded(x: Any, leading: tuple[int, ...]) -> Any:
    """The tensor broadcast over batch and heads, as strides of 0 where possible, with one batch dimension."""
    if x.shape[:-2] != leading:
        x = x.expand(*leading, -1, -1)
    return x if x.dim() == 4 else x.flatten(0, -4)


def _whole_mask(mask: Any, batch: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """The mask with four dimensions, each of 1 or of the call's size; None where no view of it is that."""
    mask = _lifted(mask)
    leading = (*(1 for _ in range(len(batch) + 3 - mask.dim())), *mask.shape[:-3])
    if any(n not in (1, size) for n, size in zip(mask.shape[-3:], sizes[1:], strict=True)):
        return None
    if mask.dim() > 4 or len(batch) > 1:
        if not all(n == 1 for n in leading) and leading != batch:
            return None
        try:
            mask = mask.view(-1, *mask.shape[-3:])
        except RuntimeError:
            # Its batch dimensions are broadcast in part: one stride does not reach all of them.
            return None
    if mask.shape[0] not in (1, sizes[0]):
        return None
    if not mask.requires_grad:
        # An expanded mask is the mask that it was before, for which there may be a kernel already.
        for dim, stride in enumerate(mask.stride()):
            mask = mask.narrow(dim, 0, 1) if stride == 0 else mask
    return mask


def _attend(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    """The output with heads first; None where no kernel can be planned."""
    program = TOP_LEFT if is_causal else FULL
    captured: tuple[Any, ...] = ()
    if mask is not None:
        program, captured = mask_program(mask.dtype, axes_of(mask, (*q.shape[:3], k.shape[2]))), (mask,)
    gradients = wants_gradients(q, k, v, mask)
    dims = int(q.shape[-1]), int(v.shape[-1])
    if not is_planned(program, *dims, q.dtype, gradients, dropout_p > 0.0, q.get_device()):
        return None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = attend(q, k, v, program, captured, Options(scale=scale, dropout_p=dropout_p))
    return out.transpose(1, 2)
