"""The promises about special values, empty problems, far strides and reproducibility, on the GPU."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

BF16 = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal())


def problem(
    make: Any, spec: fg.AttentionSpec, len_q: int, len_kv: int, heads: int = 4, heads_kv: int = 2, batch: int = 2
) -> Any:
    return (
        make(spec, batch, len_q, heads, spec.head_dim),
        make(spec, batch, len_kv, heads_kv, spec.head_dim),
        make(spec, batch, len_kv, heads_kv, spec.head_dim_v),
        make(spec, batch, len_q, heads, spec.head_dim_v),
    )


def test_rows_without_keys_are_empty_and_have_no_gradient(make: Any, verify: Any) -> None:
    q, k, v, do = problem(make, BF16, 200, 70)
    o, lse, dq, dk, dv = verify(BF16, q, k, v, do)
    empty = 200 - 70
    assert (o[:, :empty] == 0).all()
    assert (lse[:, :, :empty] == -torch.inf).all()
    assert (dq[:, :empty] == 0).all()
    assert (o[:, empty:] != 0).any()
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0), (0, 0), (1, 1), (1, 300), (300, 1)])
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (64, True), (256, False)])
def test_short_problems_write_every_output(
    len_q: int, len_kv: int, head_dim: int, deterministic: bool, make: Any, verify: Any
) -> None:
    spec = fg.AttentionSpec(head_dim, dtype="bf16", mask=fg.causal(), deterministic=deterministic)
    for result in verify(spec, *problem(make, spec, len_q, len_kv)):
        assert not torch.isnan(result).any()


def test_an_empty_batch_gives_empty_results(make: Any) -> None:
    q, k, v, do = (x[:0] for x in problem(make, BF16, 8, 8))
    kernel = fg.build(BF16)
    o, lse = kernel(q, k, v)
    assert (o.shape, lse.shape) == ((0, 8, 4, 64), (0, 4, 8))
    assert [x.shape[0] for x in kernel.backward(do, q, k, v, o, lse)] == [0, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_key_reaches_only_the_rows_that_may_attend_to_it(make: Any, bad: float) -> None:
    q, k, v, _ = problem(make, BF16, 200, 200)
    kernel = fg.build(BF16)
    clean, clean_lse = kernel(q, k, v)
    k[:, 150] = bad
    o, lse = kernel(q, k, v)
    assert torch.equal(o[:, :150], clean[:, :150])
    assert torch.equal(lse[:, :, :150], clean_lse[:, :, :150])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_reaches_only_the_rows_that_may_attend_to_it(make: Any, bad: float) -> None:
    q, k, v, _ = problem(make, BF16, 200, 200)
    kernel = fg.build(BF16)
    clean, clean_lse = kernel(q, k, v)
    v[:, 150] = bad
    o, lse = kernel(q, k, v)
    assert torch.equal(o[:, :150], clean[:, :150])
    assert not torch.isfinite(o[:, 150:]).any()
    assert torch.equal(lse, clean_lse)


def test_non_finite_keys_that_no_row_sees_change_nothing(make: Any) -> None:
    spec = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal("top-left"))
    q, k, v, do = problem(make, spec, 70, 200)
    kernel = fg.build(spec)

    def run() -> Any:
        o, lse = kernel(q, k, v)
        return (o, lse, *kernel.backward(do, q, k, v, o, lse))

    clean = run()
    k[:, 70:], v[:, 70:] = torch.nan, torch.nan
    poisoned = run()
    assert torch.equal(poisoned[0], clean[0])
    assert torch.equal(poisoned[1], clean[1])
    # dQ is summed by atomics, in any order. Hopper computes dK and dV of tiles with non-finite keys by a kernel that
    # does not round P and dS.
    assert torch.allclose(poisoned[2], clean[2], atol=1e-2, rtol=1e-2)
    for actual, expected in zip(poisoned[3:], clean[3:], strict=True):
        assert torch.allclose(actual[:, :70], expected[:, :70], atol=1e-2, rtol=1e-2)
        assert (actual[:, 70:] == 0).all()


@pytest.mark.parametrize("offset", [-1e6, 1e6, 0.0])
def test_logits_of_a_million_are_exact(offset: float, make: Any, judge: Any) -> None:
    spec = fg.AttentionSpec(16, dtype="fp32")
    q, k, v, _ = problem(make, spec, 100, 100)
    q[..., 0], k[..., 0] = 1000.0, offset / 1000.0
    judge(spec, q, k, v, None, 1.0, fg.build(spec)(q, k, v, scale=1.0))


def test_strides_beyond_32_bits(make: Any, verify: Any) -> None:
    free, _ = torch.cuda.mem_get_info()
    far = 2**31 + 64
    if free < 3 * far * 2:
        pytest.skip(f"needs {3 * far * 2 >> 30} GiB of free GPU memory; {free >> 30} GiB are free")
    spec = fg.AttentionSpec(64, dtype="bf16")
    storage = torch.empty(far + 2**20, dtype=torch.bfloat16, device="cuda")
    tensors = []
    for i, x in enumerate(problem(make, spec, 40, 50)):
        view = storage[i * 2**18 :].as_strided(x.shape, (far, *x.stride()[1:]))
        tensors.append(view.copy_(x))
    verify(spec, *tensors)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("elements", [1, 2, 3, 4])
def test_views_that_start_anywhere(dtype: str, elements: int, make: Any, verify: Any) -> None:
    spec = fg.AttentionSpec(64, dtype=dtype, mask=fg.causal())

    def moved(x: Any) -> Any:
        flat = torch.full((x.numel() + 8,), torch.nan, dtype=x.dtype, device=x.device)
        return flat[elements : elements + x.numel()].view(x.shape).copy_(x)

    verify(spec, *(moved(x) for x in problem(make, spec, 70, 90)))


@pytest.mark.parametrize("spec", [BF16, fg.AttentionSpec(128, dtype="fp16")], ids=lambda s: s.describe())
def test_the_forward_pass_is_bitwise_reproducible(spec: fg.AttentionSpec, make: Any) -> None:
    q, k, v, _ = problem(make, spec, 1000, 1100)
    kernel = fg.build(spec)
    first = kernel(q, k, v)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(kernel(q, k, v), first, strict=True))


#: Heads of one's own and shared ones, fewer heads than are worked on at a time and more, tiles of keys for one turn of
#: the blocks and for many.
DETERMINISTIC = {
    "shared heads": (64, {"mask": fg.causal()}, (2, 1000, 1100, 8, 2)),
    "full": (128, {}, (1, 4096, 4096, 8, 8)),
    "causal": (128, {"mask": fg.causal()}, (2, 4096, 4096, 16, 16)),
    "window": (128, {"mask": fg.window(700, 0)}, (1, 4096, 4096, 8, 8)),
    "one head of keys": (96, {"mask": fg.causal()}, (1, 2000, 2000, 8, 1)),
    "one head": (64, {}, (1, 8192, 8192, 1, 1)),
    "holes": (128, {"mask": fg.window(500, 0) | fg.global_tokens(70)}, (1, 4096, 4096, 4, 4)),
    "score": (64, {"mask": fg.causal(), "score": fg.softcap(20.0)}, (1, 2048, 4096, 4, 4)),
    "wide heads": (256, {"mask": fg.causal()}, (1, 1000, 1100, 8, 2)),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_deterministic_backward_pass_is_bitwise_reproducible(name: str, make: Any) -> None:
    head_dim, fields, (batch, len_q, len_kv, heads, heads_kv) = DETERMINISTIC[name]
    spec = fg.AttentionSpec(head_dim, dtype="bf16", deterministic=True, **fields)
    q, k, v, do = problem(make, spec, len_q, len_kv, batch=batch, heads=heads, heads_kv=heads_kv)
    kernel = fg.build(spec)
    o, lse = kernel(q, k, v)
    first = kernel.backward(do, q, k, v, o, lse)
    for _ in range(100):
        again = kernel.backward(do, q, k, v, o, lse)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    loose = fg.build(fg.AttentionSpec(head_dim, dtype="bf16", **fields)).backward(do, q, k, v, o, lse)
    for exact, other in zip(first, loose, strict=True):
        assert torch.allclose(exact.float(), other.float(), atol=2e-2, rtol=2e-2)


def test_deterministic_backward_passes_that_share_the_gpu_go_on(make: Any) -> None:
    """On two streams at once neither has all of its blocks running from the start."""
    spec = fg.AttentionSpec(128, dtype="bf16", mask=fg.causal(), deterministic=True)
    q, k, v, do = problem(make, spec, 4096, 4096, batch=1, heads=16, heads_kv=16)
    kernel = fg.build(spec)
    o, lse = kernel(q, k, v)
    first = kernel.backward(do, q, k, v, o, lse)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(kernel.backward(do, q, k, v, o, lse))
    torch.cuda.synchronize()
    for again in found:
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
