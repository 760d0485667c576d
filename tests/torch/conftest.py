"""torch on the CPU, with the emulator in the GPU's place: everything but the device is real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

try:
    import torch
except ImportError:
    # Tests of this folder skip themselves; their shared fixtures must still import.
    torch = None


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Kernels run on the emulator; the list holds the spec of each."""
    import flashgen as fg
    from flashgen.torch import emulate_cpu, kernels

    built: list[Any] = []

    def build(spec: Any, **options: Any) -> Any:
        built.append(spec)
        return fg.build(spec, **options)

    monkeypatch.setattr(kernels, "build", build)
    with emulate_cpu():
        yield built


@pytest.fixture
def inputs() -> Any:
    def make(batch: int = 2, len_q: int = 9, len_kv: int = 12, heads: int = 4, heads_kv: int = 2, dim: int = 16) -> Any:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).half().requires_grad_()

        return (
            normal(batch, len_q, heads, dim),
            normal(batch, len_kv, heads_kv, dim),
            normal(batch, len_kv, heads_kv, dim),
        )

    return make


@pytest.fixture
def rows(inputs: Any) -> Any:
    """q, k and v of so many rows, without a batch."""

    def make(total_q: int = 14, total_k: int = 18, heads: int = 6, heads_kv: int = 2) -> Any:
        made = inputs(1, total_q, total_k, heads, heads_kv)
        return tuple(x.detach()[0].requires_grad_() for x in made)

    return make


@pytest.fixture
def reference() -> Any:
    """Attention in float64 with torch's own autograd, and -inf masks."""

    def attend(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> Any:
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)

    return attend
