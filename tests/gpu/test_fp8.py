"""FP8 on a GPU: quantizing has the oracle's bits, and attention its accuracy, from short to very long sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(autouse=True)
def needs_eight_bits() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs sm_89 or later")


def rows(seed: int, *shape: int, dtype: Any = torch.bfloat16, size: float = 0.0) -> Any:
    """N(0, 1), and N(0, size^2) besides in one element of a thousand."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal() -> Any:
        return torch.randn(shape, generator=generator, device="cuda")

    chosen = torch.rand(shape, generator=generator, device="cuda") < 1e-3
    return (normal() + size * normal() * chosen).to(dtype)


def on_host(x: Any) -> Any:
    return x.float().cpu().numpy()


def codes_of(x: Any) -> Any:
    return x.view(torch.uint8).cpu().numpy()


FORMS = [(128, 128, 128), (64, 64, 128), (256, 256, 64), (80, 48, 64), (192, 128, 128), (16, 256, 128), (256, 256, 128)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "dim_v", "block"), FORMS)
@pytest.mark.parametrize("rotate", [False, True])
def test_codes_and_scales_are_those_of_the_oracle(dim: int, dim_v: int, block: int, rotate: bool, dtype: Any) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    spec = fg.AttentionSpec(dim, head_dim_v=dim_v, dtype="e4m3", out_dtype=name, scale_block=block, direction="forward")
    q, k, v = rows(0, 2, 1000, 4, dim), rows(1, 2, 777, 2, dim), rows(2, 2, 777, 2, dim_v)
    given = [(30 * x).to(dtype) for x in (q, k, v)]
    given[0][0, 3, 0, 1], given[2][1, 700, 1, 0] = torch.nan, torch.inf
    found = fg.build(spec).quantize(*given, rotate=rotate)
    for x, codes, scale, turns in zip(given, found[:3], found[3:], (rotate, rotate, False), strict=True):
        want, want_scale = oracle.quantized_rows(on_host(x), block, rotate=turns)
        np.testing.assert_array_equal(codes_of(codes), want)
        np.testing.assert_array_equal(scale.cpu().numpy(), want_scale)


def test_strided_and_packed_rows_have_the_oracles_bits() -> None:
    spec = fg.AttentionSpec(128, dtype="e4m3", scale_block=128, direction="forward", varlen=True)
    wide = rows(3, 1000, 4, 3, 129)[..., :128]
    q, k, v = wide[:, :, 0], wide[:, :2, 1], wide[:, :2, 2]
    starts = torch.tensor([7, 300, 300, 990], dtype=torch.int32, device="cuda")
    found = fg.build(spec).quantize(q, k, v, sequences=fg.Sequences(starts, starts, 690, 690))
    used = np.r_[7:990]
    for x, codes, scale, turns in zip((q, k, v), found[:3], found[3:], (True, True, False), strict=True):
        want, want_scale = oracle.quantized_packed_rows(on_host(x), starts.cpu().numpy(), 128, rotate=turns)
        np.testing.assert_array_equal(codes_of(codes)[used], want[used])
        known = np.isfinite(want_scale)
        np.testing.assert_array_equal(scale.cpu().numpy()[known], want_scale[known])


def exact(q: Any, k: Any, v: Any) -> Any:
    """Full attention in float64, a block of queries at a time."""
    parts = []
    for head in range(q.shape[2]):
        keys, values = k[0, :, head].double(), v[0, :, head].double()
        for block in q[0, :, head].double().split(1024):
            parts.append((block @ keys.T / q.shape[3] ** 0.5).softmax(-1) @ values)
    return torch.cat(parts).view(q.shape[2], q.shape[1], -1).transpose(0, 1)[None]


def rms(x: Any) -> float:
    return float(x.double().square().mean().sqrt())


#: (length, head_dim, outlier size, rotate): the error that docs/explanation/fp8.md gives, plus a fifth for other draws.
ERRORS = [
    (4096, 64, 10.0, True, 1.70e-2),
    (4096, 128, 10.0, True, 1.01e-2),
    (4096, 256, 10.0, True, 8.3e-3),
    (16384, 128, 10.0, True, 1.17e-2),
    (4096, 64, 0.0, True, 1.5e-3),
    (4096, 128, 0.0, True, 1.5e-3),
    (4096, 128, 0.0, False, 1.5e-3),
    (4096, 256, 0.0, True, 1.5e-3),
]


@pytest.mark.parametrize(("length", "dim", "size", "rotate", "most"), ERRORS)
def test_the_error_of_attention_is_the_one_that_the_page_gives(
    length: int, dim: int, size: float, rotate: bool, most: float
) -> None:
    q, k, v = (rows(seed, 1, length, 8, dim, size=size) for seed in range(3))
    assert rms(fg.fp8_attention(q, k, v, rotate=rotate) - exact(q, k, v)) < most


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("place", [0.0, 0.21, 0.5, 0.999])
def test_a_needle_among_128k_keys_is_found(dim: int, place: float) -> None:
    """The queries are like one key. Its weight is about one half, so that errors of the long sum would show, too."""
    length = 128 * 1024
    k, v = rows(4, 1, length, 2, dim), rows(5, 1, length, 2, dim)
    needle = int(place * (length - 1))
    # Logits of other keys are N(0, c^2), and that of the needle c sqrt(dim): the number c for which
    # exp(c sqrt(dim)) is the sum of all others, length * exp(c^2 / 2).
    c = dim**0.5 - (dim - 2 * np.log(length)) ** 0.5
    q = (c * k[:, needle : needle + 1].float() + 0.05 * rows(6, 1, 256, 2, dim).float()).bfloat16()
    found, lse = fg.fp8_attention(q, k, v, return_lse=True)
    want = exact(q, k, v)
    weight = rms(want) / rms(v[:, needle])
    assert 0.1 < weight < 0.99
    assert torch.isfinite(lse).all()
    # Rounding the needle's key and a query like it moves its logit by c |k|^2 / sqrt(dim) times some errors of e4m3.
    # All queries here are alike, so that these do not average out.
    assert rms(found - want) < 0.2 * rms(want)
    # Attention itself adds little to what quantizing Q, K and V does.
    block = 64 if dim > 128 else 128
    spec = fg.AttentionSpec(dim, dtype="e4m3", out_dtype="bf16", scale_block=block, direction="forward")
    *codes, q_scale, k_scale, v_scale = fg.build(spec).quantize(q, k, v)
    turned = [
        x.double() * scale.double().repeat_interleave(block, -1)[..., : x.shape[1]].transpose(1, 2)[..., None]
        for x, scale in zip(codes, (q_scale, k_scale, v_scale), strict=True)
    ]
    assert rms(found - exact(*turned)) < 0.03 * rms(want)


def test_a_value_that_all_keys_share_comes_out_of_128k_keys() -> None:
    """A sum of 128k equal terms shows how long products are accumulated: 14 bits would lose most of them."""
    q, k = (rows(seed, 1, n, 2, 128) for seed, n in ((7, 256), (8, 128 * 1024)))
    v = torch.full_like(k, 1.25)
    out = fg.fp8_attention(q, k, v)
    assert (out.float() - 1.25).abs().max() < 0.01 * 1.25


def test_a_graph_replays_both_kernels() -> None:
    q, k, v = (rows(seed, 1, 512, 4, 128) for seed in range(3))
    fg.fp8_attention(q, k, v, mask=fg.causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fg.fp8_attention(q, k, v, mask=fg.causal())
    q.copy_(rows(9, 1, 512, 4, 128))
    graph.replay()
    assert torch.equal(out, fg.fp8_attention(q, k, v, mask=fg.causal()))
