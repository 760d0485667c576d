"""What the torch layer turns into other arguments of kernels: shared keys, masks of bools, functions, packed keys."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytest.importorskip("flashgen.torch")  # registers the operators
from flashgen.compat.flash_attn_interface import flash_attn_with_kvcache  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def halves(*shape: int) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def forward_and_backward(call: Any, *arrays: Any) -> tuple[Any, ...]:
    out = call(*arrays)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), arrays))


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("length", [130, 1024])
def test_shared_keys_are_as_good_as_repeated_ones(dim: int, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = halves(4, length, 4, dim), halves(1, length, 2, dim), halves(1, length, 2, dim)
    arrays = tuple(x.requires_grad_() for x in (q, k, v))

    def shared(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), deterministic=True)

    def repeated(q: Any, k: Any, v: Any) -> Any:
        return shared(q, k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1))

    # Not to the bit: torch may add up the gradients of the two in another order.
    for a, b in zip(forward_and_backward(shared, *arrays), forward_and_backward(repeated, *arrays), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_a_tensor_of_bools_is_the_mask_of_its_elements() -> None:
    torch.manual_seed(0)
    q, k, v = (halves(2, 300, 4, 64).requires_grad_() for _ in range(3))
    mask = torch.rand(2, 1, 300, 300, device="cuda") > 0.3
    given = forward_and_backward(lambda *x: fg.attention(*x, mask=mask, deterministic=True), q, k, v)
    written = forward_and_backward(
        lambda *x: fg.attention(*x, mask=lambda b, h, q, k: mask[b, 0, q, k], deterministic=True), q, k, v
    )
    assert same(given, written)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_function_compiles_to_the_same_bits(backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton", reason="Triton is not installed; torch's inductor needs it")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("no C compiler is installed (cc, gcc or clang); Triton needs one")
    torch.manual_seed(0)
    arrays = tuple(x.requires_grad_() for x in (*(halves(2, 300, 4, 64) for _ in range(3)), halves(4, 300, 300)))

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return fg.attention(
            *(q, k, v),
            mask=lambda b, h, q, k: ~(q < k),
            score=lambda s, b, h, q, k: s + bias[h, q, k],
            deterministic=True,
        )

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    assert same(forward_and_backward(compiled, *arrays), forward_and_backward(call, *arrays))


def test_packed_keys_go_where_padded_ones_go_and_into_a_graph() -> None:
    torch.manual_seed(0)
    lengths = [1, 70, 5]
    starts = torch.tensor([0, 1, 71, 76], device="cuda", dtype=torch.int32)
    seqlens = torch.tensor([100, 0, 37], device="cuda", dtype=torch.int32)
    table = torch.randperm(24, device="cuda").int().view(3, 8)
    q, k, v = halves(3, 1, 8, 128), halves(76, 2, 128), halves(76, 2, 128)
    caches = [halves(24, 32, 2, 128) for _ in range(2)]
    others = [x.clone() for x in caches]
    angles = {"rotary_cos": halves(256, 32), "rotary_sin": halves(256, 32), "causal": True}

    def step() -> Any:
        places = {"cache_seqlens": seqlens, "cu_seqlens_k_new": starts, "page_table": table}
        return flash_attn_with_kvcache(q, *caches, k, v, **places, **angles)

    out = step()
    for b, (first, count) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        alone = flash_attn_with_kvcache(
            *(q[b : b + 1], *others, k[None, first : first + count], v[None, first : first + count]),
            cache_seqlens=seqlens[b : b + 1],
            page_table=table[b : b + 1],
            **angles,
        )
        torch.testing.assert_close(out[b : b + 1], alone, atol=2e-2, rtol=2e-2)
    assert all(torch.equal(a, b) for a, b in zip(caches, others, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    q.normal_()
    graph.replay()
    assert torch.equal(captured, step())
