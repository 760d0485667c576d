"""flash-attn's published matrix of tests, for its dense functions: ``flash_attn_matrix`` says what is in it.

The whole of it takes minutes on an H200: ``DRAWN_CASES=nightly pytest -m gpu tests/gpu/test_flash_attn.py -n 11``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import flashgen as fg
from tests.gpu.flash_attn_matrix import (
    CAUSAL_LENGTHS,
    DIMS,
    KINDS,
    WHOLE,
    Case,
    Kind,
    band,
    cases,
    check,
    distances,
    kept_pairs,
    options_of,
    references,
    run,
)

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

BATCH = 2
#: Few queries and many keys, where kernels of others split these.
SPLIT_LENGTHS = ((1, 339), (3, 1024), (64, 800), (64, 2048), (16, 20_000), (16, 100_000))


def inputs(dim: int, dtype: Any, lengths: tuple[int, int], heads: tuple[int, int], size: float = 1.0) -> Any:
    (len_q, len_kv), (heads_q, heads_kv) = lengths, heads
    shapes = ((len_q, heads_q, size), (len_kv, heads_kv, 1.0), (len_kv, heads_kv, 1.0))
    made = [torch.randn(BATCH, n, h, dim, device="cuda", dtype=dtype) * s for n, h, s in shapes]
    return tuple(x.requires_grad_() for x in made)


def check_case(kind: Kind, case: Case) -> None:
    tensors = inputs(kind.dim, getattr(torch, kind.dtype), case.lengths, case.heads, kind.cap or 1.0)
    slopes = torch.rand(BATCH, case.heads[0], device="cuda") * 0.3 if kind.alibi else None
    distance = distances(*case.lengths)
    allowed, options, kept = band(distance, kind.causal, case.window), options_of(kind, case, slopes), []
    do = torch.randn(*tensors[0].shape, device="cuda", dtype=tensors[0].dtype)

    def attend(*x: Any, deterministic: bool) -> Any:
        out, lse, signed = fg.flash_attn_func(*x, **options, deterministic=deterministic, return_attn_probs=True)
        assert lse.shape == (BATCH, case.heads[0], case.lengths[0])
        assert kind.drops or signed.numel() == 0
        if kind.drops:
            kept.append(kept_pairs(signed, allowed, case.lengths))
        return out

    attends = [partial(attend, deterministic=way) for way in case.deterministic]
    check(attends, tensors, do, (allowed, distance.abs(), kind.cap, slopes), kept)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_output_and_gradients(plain_outputs: None, kind: Kind) -> None:
    torch.manual_seed(0)
    for case in cases(kind):
        check_case(kind, case)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dim", DIMS if WHOLE else DIMS[1::3])
def test_few_queries_and_many_keys(plain_outputs: None, dim: int, alibi: bool) -> None:
    """Twice the error of the rounded formula, eight times with ALiBi, and 2e-4, for gradients too."""
    torch.manual_seed(0)
    for number, lengths in enumerate(SPLIT_LENGTHS):
        for causal, window in ((number % 2 == 0, (-1, -1)), (False, (lengths[1] // 2, 7))):
            tensors = inputs(dim, torch.float16, lengths, (6, 6))
            slopes = torch.rand(BATCH, 6, device="cuda") * 0.3 if alibi else None
            options = {"causal": causal, "window_size": window, "alibi_slopes": slopes}
            distance = distances(*lengths)
            rules, do = (band(distance, causal, window), distance.abs(), 0.0, slopes), torch.randn_like(tensors[0])
            found = run(partial(fg.flash_attn_func, **options), tensors, do)
            exact, rounded = references(tensors, do, rules)
            for name, ours, theirs, right in zip(("out", "dq", "dk", "dv"), found, rounded, exact, strict=True):
                factor = 2 if name == "out" or not alibi else 8
                limit = factor * (theirs - right).abs().max() + (1e-5 if name == "out" else 2e-4)
                assert (ours - right).abs().max() <= limit, f"{name} of {lengths}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [16, 32, 64])
def test_large_logits_do_not_overflow_where_there_are_no_keys(plain_outputs: None, dim: int, dtype: str) -> None:
    """Five times the error of the rounded formula."""
    torch.manual_seed(0)
    for length in (1, 2, 5, 17, 128):
        for causal in (False, True):
            sizes = (5.0, 3.0, 3.0)
            tensors = tuple(
                (torch.randn(BATCH, length, 5, dim, device="cuda") * s).to(getattr(torch, dtype)).requires_grad_()
                for s in sizes
            )
            distance, do = distances(length, length), torch.randn_like(tensors[0])
            rules = band(distance, causal, (-1, -1)), distance, 0.0, None
            found = run(partial(fg.flash_attn_func, causal=causal), tensors, do)
            exact, rounded = references(tensors, do, rules)
            for name, ours, theirs, right in zip(("out", "dq", "dk", "dv"), found, rounded, exact, strict=True):
                limit = 5 * (theirs - right).abs().max() + 1e-3
                assert (ours - right).abs().max() <= limit, f"{name} of {length}"


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("dim", [64, 111, 128])
def test_packed_functions_are_the_same_as_the_plain_one(plain_outputs: None, dim: int, packed: str) -> None:
    q, k, v = inputs(dim, torch.bfloat16, (257, 257), (4, 4))
    do = torch.randn_like(q)
    options = {"causal": True, "deterministic": True}
    expected = run(lambda *x: fg.flash_attn_func(*x, **options), (q, k, v), do)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if packed == "qkv":
            return fg.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
        return fg.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)

    assert all(torch.equal(a, b) for a, b in zip(run(attend, (q, k, v), do), expected, strict=True))


#: Shapes and options whose results are computed again and again.
REPEATED = [(128, (239, 1024), 0.0), (64, (1023, 1024), 0.17)]
if WHOLE:
    REPEATED += [(dim, lengths, p) for dim in (32, 96, 192, 256) for lengths in CAUSAL_LENGTHS for p in (0.0, 0.17)]


@pytest.mark.parametrize(("dim", "lengths", "p"), REPEATED)
def test_the_same_bits_in_250_runs(plain_outputs: None, dim: int, lengths: tuple[int, int], p: float) -> None:
    """The output and the gradients of keys always; that of queries within what an order of additions can change."""
    tensors = inputs(dim, torch.bfloat16, lengths, (6, 2))
    do = torch.randn_like(tensors[0])

    def again() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return run(lambda *x: fg.flash_attn_func(*x, p, causal=True), tensors, do)

    first = again()
    slack = 2 * ((first[1] + 0.3 - 0.3) - first[1]).abs().max()
    for _ in range(250):
        out, dq, dk, dv = again()
        assert torch.equal(out, first[0])
        assert torch.equal(dk, first[2])
        assert torch.equal(dv, first[3])
        assert (dq - first[1]).abs().max() <= slack


@pytest.mark.parametrize("dim", DIMS if WHOLE else [64])
def test_the_same_bits_in_50_deterministic_runs(plain_outputs: None, dim: int) -> None:
    for lengths in ((512, 512), *(CAUSAL_LENGTHS if WHOLE else ())):
        tensors = inputs(dim, torch.float16, lengths, (4, 4))
        do = torch.randn_like(tensors[0])
        for options in ({"window_size": (60, 8)}, {"causal": True}):

            def attend(*x: Any, options: dict[str, Any] = options) -> Any:
                return fg.flash_attn_func(*x, **options, deterministic=True)

            first = run(attend, tensors, do)
            for _ in range(50):
                assert all(torch.equal(a, b) for a, b in zip(run(attend, tensors, do), first, strict=True))


def test_transposed_strides(plain_outputs: None) -> None:
    """Lengths and heads out of order in memory, and gradients that arrive so."""
    q, k, v = (
        x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        for x in inputs(64, torch.bfloat16, (200, 200), (4, 4))
    )
    do = torch.randn(4, 200, BATCH, 64, device="cuda", dtype=torch.bfloat16).permute(2, 1, 0, 3)
    plain = tuple(x.detach().contiguous().requires_grad_() for x in (q, k, v))
    expected = run(fg.flash_attn_func, plain, do.contiguous())
    found = run(fg.flash_attn_func, (q, k, v), do)
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
