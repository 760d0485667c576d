"""flash-attn's published matrix of tests, for its dense functions: shapes, options, and its rule for errors.

The rule: the largest error against attention in float32 is at most twice, for gradients three times, that of the same
formula computed in the inputs' dtype, and 1e-5, or for gradients with a cap 3e-4, where that is right by accident.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)),
    *((1024, 1023), (1, 239), (3, 799), (127, 512), (512, 127), (127, 513), (799, 3), (2048, 2048)),
)
HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
BATCH = 2


def reference(q: Any, k: Any, v: Any, allowed: Any, cap: float, slopes: Any, *, exact: bool) -> Any:
    """Attention in float32, or in the inputs' dtype with the scale applied to k, for the other order of rounding."""
    dtype, group, scale = q.dtype, q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    if exact:
        q, k, v = q.float(), k.float(), v.float()
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k) if exact else torch.einsum("bqhd,bkhd->bhqk", q, k * scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        places = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
        distance = (places - torch.arange(k.shape[1], device=q.device)).abs()
        scores = scores - slopes.view(-1, q.shape[2], 1, 1) * distance
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1).to(v.dtype).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(dtype)


def allowed_pairs(len_q: int, len_kv: int, causal: bool, window: tuple[int, int]) -> Any:
    distance = torch.arange(len_kv, device="cuda") - torch.arange(len_q, device="cuda")[:, None] - (len_kv - len_q)
    left, right = window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return allowed & (distance <= 0) if causal else allowed


def run(attend: Any, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
    out = attend(q, k, v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), do))


def check(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    allowed = allowed_pairs(q.shape[1], k.shape[1], causal, window)
    rules = (allowed, options.get("softcap", 0.0), options.get("alibi_slopes"))
    do = torch.randn(*q.shape[:3], v.shape[-1], device="cuda", dtype=q.dtype)
    exact = run(lambda q, k, v: reference(q, k, v, *rules, exact=True), q, k, v, do)
    rounded = run(lambda q, k, v: reference(q, k, v, *rules, exact=False), q, k, v, do)
    found = run(lambda q, k, v: fg.flash_attn_func(q, k, v, **options), q, k, v, do)
    for name, factor, *results in zip(("out", "dq", "dk", "dv"), (2, 3, 3, 3), found, rounded, exact, strict=True):
        ours, theirs, right = (x.float() for x in results)
        slack = 3e-4 if "softcap" in options and name != "out" else 1e-5
        limit = factor * (theirs - right).abs().max() + slack
        error = (ours - right).abs().max()
        assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"


def inputs(dim: int, dtype: Any, lengths: tuple[int, int], heads: tuple[int, int]) -> tuple[Any, ...]:
    (len_q, len_kv), (heads_q, heads_kv) = lengths, heads
    shapes = ((len_q, heads_q), (len_kv, heads_kv), (len_kv, heads_kv))
    return tuple(torch.randn(BATCH, *s, dim, device="cuda", dtype=dtype).requires_grad_() for s in shapes)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "local": {"window_size": (53, 21)},
    "local and causal": {"window_size": (91, 0), "causal": True, "deterministic": True},
    "softcap": {"softcap": 50.0, "causal": True},
    "alibi": {"alibi_slopes": True, "causal": True},
}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_output_and_gradients(plain_outputs: None, dim: int, kind: str) -> None:
    torch.manual_seed(0)
    half = torch.float16 if dim % 64 == 0 and kind in ("causal", "softcap") else torch.bfloat16
    for lengths, heads in zip(LENGTHS, itertools.cycle(HEADS.values())):
        if kind == "softcap" and lengths[0] > 1024:
            continue
        made = inputs(dim, half, lengths, heads)
        options = dict(OPTIONS[kind])
        if "softcap" in options:
            made = tuple(
                (x.detach() * options["softcap"]).requires_grad_() if i == 0 else x for i, x in enumerate(made)
            )
        if "alibi_slopes" in options:
            options["alibi_slopes"] = torch.rand(BATCH, heads[0], device="cuda") * 0.3
        check(*made, options)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("dim", [64, 111, 128])
def test_packed_functions_are_the_same_as_the_plain_one(plain_outputs: None, dim: int, packed: str) -> None:
    q, k, v = inputs(dim, torch.bfloat16, (257, 257), (4, 4))
    do = torch.randn_like(q)
    options = {"causal": True, "deterministic": True}
    expected = run(lambda q, k, v: fg.flash_attn_func(q, k, v, **options), q, k, v, do)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if packed == "qkv":
            return fg.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
        return fg.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)

    assert all(torch.equal(a, b) for a, b in zip(run(attend, q, k, v, do), expected, strict=True))


def test_the_same_bits_in_250_runs(plain_outputs: None) -> None:
    """The output and the gradients of keys always; that of queries within what an order of additions can change."""
    q, k, v = inputs(128, torch.bfloat16, (239, 1024), (6, 2))
    do = torch.randn_like(q)
    first = run(lambda q, k, v: fg.flash_attn_func(q, k, v, causal=True), q, k, v, do)
    slack = 2 * ((first[1] + 0.3 - 0.3) - first[1]).abs().max()
    for _ in range(250):
        out, dq, dk, dv = run(lambda q, k, v: fg.flash_attn_func(q, k, v, causal=True), q, k, v, do)
        assert torch.equal(out, first[0])
        assert torch.equal(dk, first[2])
        assert torch.equal(dv, first[3])
        assert (dq - first[1]).abs().max() <= slack


def test_the_same_bits_in_50_deterministic_runs(plain_outputs: None) -> None:
    q, k, v = inputs(64, torch.float16, (512, 512), (4, 4))
    do = torch.randn_like(q)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.flash_attn_func(q, k, v, window_size=(60, 8), deterministic=True)

    first = run(attend, q, k, v, do)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(run(attend, q, k, v, do), first, strict=True))


def test_transposed_strides(plain_outputs: None) -> None:
    """Lengths and heads out of order in memory, and gradients that arrive so."""
    q, k, v = (
        x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        for x in inputs(64, torch.bfloat16, (200, 200), (4, 4))
    )
    do = torch.randn(4, 200, BATCH, 64, device="cuda", dtype=torch.bfloat16).permute(2, 1, 0, 3)
    expected = run(fg.flash_attn_func, *(x.detach().contiguous().requires_grad_() for x in (q, k, v)), do.contiguous())
    found = run(fg.flash_attn_func, q, k, v, do)
    for a, b in zip((found[0], *found[2:]), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.0, 0.17])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_fraction_dropped(plain_outputs: None, dim: int, p: float) -> None:
    """With equal logits and a unit matrix for v, the output shows which pairs are kept; and other ones each time."""
    q = torch.zeros(2, 512, 4, dim, device="cuda", dtype=torch.float16)
    v = torch.eye(dim, device="cuda", dtype=torch.float16)[None, :, None].expand(2, dim, 4, dim)
    out, again = (fg.flash_attn_func(q, q[:, :dim], v, p) for _ in range(2))
    assert abs((out == 0).double().mean().item() - p) < 0.01
    assert torch.equal(out, again) == (p == 0.0)
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / dim / (1 - p)), rtol=2e-3, atol=0)


def test_a_graph_drops_other_pairs_at_each_replay(plain_outputs: None) -> None:
    q, k, v = (x.detach() for x in inputs(64, torch.float16, (128, 128), (4, 4)))
    fg.flash_attn_func(q, k, v, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fg.flash_attn_func(q, k, v, 0.5)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])
