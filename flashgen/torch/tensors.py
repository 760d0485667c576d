"""What a call does with its tensors before a kernel sees them, and whether the dispatcher must see them first."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import ArgumentError

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def needs_dispatcher(q: Any, k: Any, v: Any) -> bool:
    """Whether a tensor subclass, a dispatch mode or a function transform must see the call as an operator."""
    if type(q) in PLAIN_TYPES and type(k) in PLAIN_TYPES and type(v) in PLAIN_TYPES:
        return _dispatch_modes() > 0 or _transforms() is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a torch.Tensor")
    return True


def wants_gradients(*tensors: Any) -> bool:
    """Whether autograd records a call on these tensors; arguments may be missing or of a wrong type."""
    if torch.is_grad_enabled():
        for x in tensors:
            if getattr(x, "requires_grad", False):
                return True
    return False


def rows_contiguous(x: Any) -> Any:
    """The tensor itself if its last stride is 1, else a contiguous copy."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def over_batch(q: Any, x: Any) -> Any:
    """Keys or values of batch 1 as those of each sequence: with a stride of 0, and gradients that torch sums."""
    if isinstance(q, torch.Tensor) and isinstance(x, torch.Tensor) and q.dim() == x.dim() == 4:
        return x if x.shape[0] != 1 or q.shape[0] == 1 else x.expand(q.shape[0], -1, -1, -1)
    return x


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The tensors in the autocast dtype, where autocast would change them."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        eligible = x.device.type == device and x.is_floating_point() and x.dtype not in (torch.float64, dtype)
        return x.to(dtype) if eligible else x

    return cast(q), cast(k), cast(v)


def kernel_inputs(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Tensors as the kernels take them: cast by autocast, rows without gaps."""
    # Without a name, torch answers for CUDA, in a third of the time.
    if torch.is_autocast_enabled() if q.is_cuda else torch.is_autocast_enabled("cpu"):
        q, k, v = autocast(q, k, v)
    try:
        if q.stride()[-1] != 1 or k.stride()[-1] != 1 or v.stride()[-1] != 1:
            q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    except IndexError:
        shapes = ", ".join(f"{name} has shape {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ArgumentError(f"{shapes}; each must have 4 dimensions: (batch, length, heads, dim)") from None
    return q, k, v
