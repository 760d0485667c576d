"""Masks, scores and gradients of captured tensors on a GPU: against the oracle, and the same bits every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

BATCH, HEADS, HEADS_KV, LENGTH = 2, 4, 2, 300
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.standard_normal(shape).astype(np.float32)


IDS = np.sort(RANDOM.integers(0, 4, (BATCH, LENGTH))).astype(np.int32)


def bits(words: Any) -> fg.Mask:
    return fg.Mask.of(lambda b, h, q, k: ((q ^ k) & 5 == 0) | (k >> 4 == q >> 4) | ((1 << (k & 7)) & words[h] != 0))


def waves(slopes: Any) -> fg.Score:
    return fg.Score.of(lambda s, b, h, q, k: s * ((q - k) * 0.3).cos() + (slopes[h] * s).sin() + (q - k).abs().sqrt())


def angles(table: Any) -> fg.Score:
    return fg.Score.of(lambda s, b, h, q, k: s + fg.sin(table[k]) * fg.cos(table[q]))


MASKS = {
    "causal documents": lambda on: fg.causal() & fg.document(on(IDS)),
    "documents": lambda on: fg.document(on(IDS)),
    "prefix": lambda on: fg.prefix_lm(70),
    "dilated": lambda on: fg.causal() & fg.dilated(7),
    "global": lambda on: fg.window(20, 0) | fg.global_tokens(5),
    "chunked": lambda on: fg.causal() & fg.chunked(90),
    "padding": lambda on: fg.key_padding(on(np.array([0, 170], np.int32))),
    "bits": lambda on: bits(on(np.array([0, 1, 0x55, 0x80], np.int32))),
    "blocks": lambda on: fg.block_sparse(on(RANDOM.integers(0, 2, (HEADS, 5, 5)).astype(bool)), 64),
}
SCORES = {
    "softcap": lambda on: fg.softcap(3.0),
    "softcap far above": lambda on: fg.softcap(50.0),
    "alibi": lambda on: fg.alibi(on(normal(HEADS))),
    "bias": lambda on: fg.bias(on(normal(1, HEADS, LENGTH, LENGTH))),
    "relative": lambda on: fg.relative_bias(on(normal(HEADS, 65))),
    "sink": lambda on: fg.sink(on(normal(HEADS))),
    "waves": lambda on: waves(on(normal(HEADS))),
    "angles": lambda on: angles(on(np.geomspace(1e-3, 1e30, LENGTH, dtype=np.float32))),
    "everything": lambda on: fg.softcap(3.0) >> fg.alibi(on(normal(HEADS))) >> fg.sink(on(normal(HEADS))),
}


def device(x: Any) -> Any:
    return torch.as_tensor(x, device="cuda")


def inputs(spec: fg.AttentionSpec, seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[spec.dtype]
    shapes = [(BATCH, LENGTH, n, spec.head_dim) for n in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def check(spec: fg.AttentionSpec, judge: Any) -> None:
    kernel = fg.build(spec)
    q, k, v, do = inputs(spec)
    out, lse = kernel(q, k, v)
    *results, captured = kernel.backward(do, q, k, v, out, lse, captured_gradients=True)
    judge(spec, q, k, v, do, None, (out, lse, *results))
    arrays = [x.float().cpu().numpy() for x in (q, k, v, do)]
    exact = fg.oracle.captured_gradients(spec, *arrays)
    limits = fg.oracle.captured_bounds(spec, *arrays)
    assert set(captured) == set(exact)
    for name, gradient in captured.items():
        verdict = fg.oracle.check(gradient.float().cpu().numpy(), exact[name], limits[name])
        assert verdict.ok, (name, verdict)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_obeyed(name: str, head_dim: int, deterministic: bool, judge: Any) -> None:
    spec = fg.AttentionSpec(head_dim, mask=MASKS[name](device), deterministic=deterministic)
    forward = fg.build(spec).plan.kernel("forward")
    assert forward.algorithm == ("FlashAttention-3" if forward.arch.has_wgmma else "FlashAttention-2")
    check(spec, judge)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_ids_of_long_sequences_may_come_in_any_order(head_dim: int, judge: Any) -> None:
    """Such rows are searched: wherever its tokens lie, a document gets what attention to itself alone gives."""
    length = 40_000
    torch.manual_seed(head_dim)
    ids = torch.arange(length, device="cuda") ** 2 // 10**8 - 7
    alone = fg.AttentionSpec(head_dim, dtype="bf16")
    kernel = fg.build(fg.AttentionSpec(head_dim, dtype="bf16", mask=fg.document(ids.to(torch.int32)[None])))
    tensors = [torch.randn(1, length, 1, head_dim, device="cuda").bfloat16() for _ in range(4)]
    for order in (torch.arange(length, device="cuda"), torch.randperm(length, device="cuda")):
        q, k, v, do = (x[:, order].contiguous() for x in tensors)
        captured = {"ids": ids[order].to(torch.int32)[None]}
        out, lse = kernel(q, k, v, captured=captured)
        gradients = kernel.backward(do, q, k, v, out, lse, captured=captured)
        # The last one and two others; the first is too long for the oracle.
        for number in (int(ids[-1]), 0, 3):
            mine = ids[order] == number
            results = (out[:, mine], lse[:, :, mine], *(x[:, mine] for x in gradients))
            judge(alone, *(x[:, mine] for x in (q, k, v, do)), None, results)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_applied_and_differentiated(name: str, judge: Any) -> None:
    check(fg.AttentionSpec(64, mask=fg.causal(), score=SCORES[name](device)), judge)
    spec = fg.AttentionSpec(128, dtype="fp16", mask=MASKS["documents"](device), score=SCORES[name](device))
    check(spec, judge)


@pytest.mark.parametrize(("mask", "score"), [("documents", "everything"), ("blocks", "bias"), ("global", "sink")])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_heads_obey_masks_and_scores(head_dim: int, mask: str, score: str, judge: Any) -> None:
    check(fg.AttentionSpec(head_dim, mask=MASKS[mask](device), score=SCORES[score](device)), judge)


@pytest.mark.parametrize("name", ["alibi", "bias", "relative", "everything"])
def test_gradients_of_captured_tensors_have_the_same_bits_in_a_hundred_runs(name: str) -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=SCORES[name](device), deterministic=True)
    kernel = fg.build(spec)
    q, k, v, do = inputs(spec)
    out, lse = kernel(q, k, v)
    first = kernel.backward(do, q, k, v, out, lse, captured_gradients=True)
    assert first[3]
    for _ in range(99):
        again = kernel.backward(do, q, k, v, out, lse, captured_gradients=True)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))
        assert all(torch.equal(first[3][n].view(torch.uint8), again[3][n].view(torch.uint8)) for n in first[3])


def test_attention_gives_torch_the_gradients_of_what_its_functions_captured() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(1, 200, 2, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    slopes = torch.tensor([0.1, 0.4], device="cuda", requires_grad=True)
    out = fg.attention(q, k, v, mask=fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (k - q))
    do = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, slopes), do)

    wide = [x.detach().float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    learned = slopes.detach().clone().requires_grad_()
    at = torch.arange(200, device="cuda")
    bias = learned[:, None, None] * (at[None, :] - at[:, None])
    scores = wide[0] @ wide[1].transpose(-1, -2) / 8 + bias
    scores = scores.masked_fill(at[None, :] > at[:, None], -torch.inf)
    expected = torch.autograd.grad(scores.softmax(-1) @ wide[2], (*wide, learned), do.float().transpose(1, 2))
    for mine, theirs in zip(found[:3], expected[:3], strict=True):
        assert (mine.float() - theirs.transpose(1, 2)).norm() < 2e-2 * theirs.norm()
    assert (found[3] - expected[3]).norm() < 2e-2 * expected[3].norm()
