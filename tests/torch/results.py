"""What calls gave, and which operators they were to somebody who watches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def forward_and_backward(call: Any, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    out = call(q, k, v)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v)))


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
