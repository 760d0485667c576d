"""Documents, and attention by torch's own operators, with any mask and score."""

from __future__ import annotations

from typing import Any

import torch

IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [2] * 10], dtype=torch.int32)


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual.double(), expected.double(), atol=6e-3, rtol=6e-3))


def expected(q: Any, k: Any, v: Any, mask: Any = None, score: Any = None) -> Any:
    """Attention in float64; the functions take whole index arrays, so they are the user's own."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    sizes = logits.shape
    b, h, i, j = (torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(sizes))
    if score is not None:
        logits = score(logits, b, h, i, j)
    if mask is not None:
        logits = logits.masked_fill(~mask(b, h, i, j).expand(sizes), float("-inf"))
    return (logits.softmax(-1).nan_to_num() @ v).transpose(1, 2)
