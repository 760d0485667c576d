"""Calls of torch's attention function, and what its math backend computes for them in float64."""

from __future__ import annotations

from typing import Any

import torch

sdpa = torch.nn.functional.scaled_dot_product_attention
#: How far a result may be from float64's, relative to the largest element.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A leaf of random numbers."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def run(call: Any, *tensors: Any) -> tuple[Any, ...]:
    """The result of a call, and the gradient of each tensor that wants one, for one gradient of the result."""
    out = call(*tensors)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.device, out.dtype)
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    return (out.detach(), *(torch.autograd.grad(out, wanted, do) if wanted else ()))


def exact(q: Any, k: Any, v: Any, mask: Any = None, *, kept: Any = None, dropout_p: float = 0.0, **options: Any) -> Any:
    """The same for torch's math backend in float64; ``kept`` says which pairs dropout keeps."""

    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        math = torch.ops.aten._scaled_dot_product_attention_math
        out, _ = math(q, k, v, mask, dropout_p, options.pop("is_causal", False), kept, **options)
        return out

    def doubled(x: Any) -> Any:
        return x if x is None else x.detach().double().requires_grad_(x.requires_grad)

    return run(call, *map(doubled, (q, k, v, mask)))


def assert_close(found: Any, expected: Any, dtype: torch.dtype, least: float = 1.0) -> None:
    """Fails unless every result is what float64 gives, relative to ``least`` where all are smaller."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        worst, largest = (a.double() - b).abs().max().item(), max(b.abs().max().item(), least)
        assert worst <= TOLERANCE[dtype] * largest, f"off by {worst}; the largest element is {largest}"
