"""Three sequences that lie behind one another, and results compared."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg

LENGTHS = ((5, 7), (0, 3), (9, 8))


def starts(*lengths: int) -> Any:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def sequences(lengths: Any = LENGTHS, **more: Any) -> fg.Sequences:
    of_q, of_k = zip(*lengths, strict=True)
    return fg.Sequences(starts(*of_q), starts(*of_k), max(of_q), max(of_k), **more)


def forward_and_backward(call: Any, *tensors: Any) -> tuple[Any, ...]:
    torch.manual_seed(5)
    out, lse = call(*tensors)
    loss = out.float().square().sum() + lse.square().nan_to_num(0, 0, 0).sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors))


def close(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.allclose(x.double(), y.double(), atol=4e-3) for x, y in zip(a, b, strict=True))
