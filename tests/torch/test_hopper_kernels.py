"""Which kernels public functions run on a Hopper GPU: those for Hopper, whatever a caller brings that they can take.

The emulator stands in for the GPU. Results are compared with torch's elsewhere; here only kernels matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn")
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

#: Of kernels that attend, or compute gradients by products.
ROLES = ("forward", "prefill", "decode", "main", "query")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The template of each kernel of products that a call runs, where kernels are built for Hopper."""
    from flashgen.launch.call.prepared import Call
    from flashgen.torch import emulate_cpu, kernels

    seen: list[str] = []
    run = Call.run

    def noted(self: Call, *arguments: Any) -> Any:
        plans = [step.kernel.plan for step in self.steps]
        seen.extend(plan.template for plan in plans if plan.role in ROLES)
        return run(self, *arguments)

    def built(spec: Any, **options: Any) -> Any:
        return fg.build(spec, **{**options, "arch": "sm_90a"})

    monkeypatch.setattr(Call, "run", noted)
    monkeypatch.setattr(kernels, "build", built)
    with emulate_cpu():
        yield seen


def halves(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def tensors(len_q: int, len_kv: int, dim: int = 64, heads: int = 2) -> Any:
    shapes = ((1, len_q, heads, dim), (1, len_kv, 1, dim), (1, len_kv, 1, dim))
    return tuple(halves(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))


def starts(*lengths: int) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rows(dim: int = 64) -> Any:
    return tuple(x.detach()[0].requires_grad_() for x in tensors(100, 100, dim))


def packed_by(function: Any, dim: int = 64, **options: Any) -> Any:
    return function(*rows(dim), starts(30, 70), starts(30, 70), 70, 70, causal=True, **options)


TRAINING: dict[str, Callable[[], Any]] = {
    "attention": lambda: fg.attention(*tensors(40, 50), mask=fg.causal()),
    "attention, dropout": lambda: fg.attention(*tensors(40, 50), mask=fg.causal(), dropout_p=0.1),
    "attention, padded heads": lambda: fg.attention(*tensors(40, 50, dim=40), mask=fg.causal()),
    "attention, deterministic": lambda: fg.attention(*tensors(40, 50), mask=fg.causal(), deterministic=True),
    "flash-attn": lambda: fa2.flash_attn_func(*tensors(40, 50), causal=True, dropout_p=0.1),
    "flash-attn, packed": lambda: packed_by(fa2.flash_attn_varlen_func),
    "flash-attn, packed, padded heads, dropout": lambda: packed_by(fa2.flash_attn_varlen_func, 80, dropout_p=0.1),
    "FlashAttention-3": lambda: fa3.flash_attn_func(*tensors(40, 50), causal=True),
    "FlashAttention-3, packed": lambda: packed_by(fa3.flash_attn_varlen_func),
}


def train(out: Any) -> None:
    out.float().square().sum().backward()


@pytest.mark.parametrize("call", TRAINING.values(), ids=TRAINING)
def test_hoppers_kernels_run_both_passes_of_training(ran: list[str], call: Callable[[], Any]) -> None:
    train(call())
    assert ran == ["hopper/forward.cu.j2", "hopper/backward_main.cu.j2"]


def test_hoppers_kernels_run_what_torch_calls(ran: list[str]) -> None:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in tensors(40, 40, heads=1))
    with fg.torch.enable_sdpa():
        train(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert ran == ["hopper/forward.cu.j2", "hopper/backward_main.cu.j2"]


def test_wide_heads_have_a_kernel_for_dq(ran: list[str]) -> None:
    train(fg.attention(*tensors(40, 50, dim=136), mask=fg.causal()))
    assert ran == ["hopper/forward.cu.j2", "hopper/backward_keys.cu.j2", "hopper/backward_query.cu.j2"]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("new", "template"), [(1, "decode"), (63, "decode"), (64, "forward")])
def test_hoppers_kernels_read_a_cache(ran: list[str], new: int, template: str, paged: bool) -> None:
    shape = (10, 16, 1, 64) if paged else (1, 160, 1, 64)
    caches = halves(*shape, seed=1), halves(*shape, seed=2)
    more = {"block_table": torch.randperm(10)[None].int()} if paged else {}
    added = {"k": halves(1, new, 1, 64), "v": halves(1, new, 1, 64)}
    with torch.no_grad():
        fa2.flash_attn_with_kvcache(
            halves(1, new, 2, 64), *caches, **added, cache_seqlens=torch.tensor([50]).int(), causal=True, **more
        )
    assert ran == [f"hopper/{template}.cu.j2"]
