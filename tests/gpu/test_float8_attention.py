"""Attention in e4m3 on a GPU: as near to exact attention as P in e4m3 allows, for every shape of scales, and as exact
for long rows as for short ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
from flashgen.compat import flash_attn_interface  # noqa: E402

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

HEADS, HEADS_KV = 4, 2
#: The largest power of two in e4m3, by which P is multiplied before it is rounded.
LARGEST_P = 256.0
#: The last of the 14 bits by which the tensor cores add e4m3 products.
SUM_EPSILON = 2.0**-13
MASKS: dict[str, Any] = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.window(200, 30),
    "chunks": fg.chunked(300),
}


def allowed(name: str, len_q: int, len_kv: int) -> Any:
    # The last query and the last key have the same position.
    own = torch.arange(len_q, device=DEVICE)[:, None] + len_kv - len_q
    k = torch.arange(len_kv, device=DEVICE)[None]
    return {
        "full": (k >= 0) & (own == own),
        "causal": k <= own,
        "window": (k <= own + 30) & (k >= own - 200),
        "chunks": torch.div(own, 300, rounding_mode="floor") == k // 300,
    }[name]


def eighths(*shape: int) -> Any:
    return torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)


def spread(scale: Any, length: int, block: int | None) -> Any:
    """The scale of each row of (batch, length, heads, columns), of one for each head or for each block of rows."""
    by_row = scale[..., None] if block is None else scale.repeat_interleave(block, -1)[..., :length]
    return by_row.transpose(1, 2)[..., None].double()


class Problem:
    """Inputs, and what attention on them gives."""

    def __init__(self, dim: int, len_q: int, len_kv: int, mask: str, block: int | None = None, heads: int = HEADS):
        torch.manual_seed(dim + len_q)
        kv = min(heads, HEADS_KV)
        self.q = eighths(2, len_q, heads, dim)
        self.k, self.v = eighths(2, len_kv, kv, dim), eighths(2, len_kv, kv, dim)
        sizes = ((len_q, heads), (len_kv, kv), (len_kv, kv))
        shapes = [(2, of, *([-(-length // block)] if block else [])) for length, of in sizes]
        self.scales = [torch.rand(shape, device=DEVICE) + 0.5 for shape in shapes]
        self.mask, self.block, self.allowed = mask, block, allowed(mask, len_q, len_kv)

    def call(self, **options: Any) -> Any:
        q_scale, k_scale, v_scale = self.scales
        return fg.attention(
            self.q,
            self.k,
            self.v,
            mask=MASKS[self.mask],
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            scale_block=self.block,
            return_lse=True,
            **options,
        )

    def expected(self) -> Expected:
        q, k, v = (
            x.double() * spread(s, x.shape[1], self.block)
            for x, s in zip((self.q, self.k, self.v), self.scales, strict=True)
        )
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~self.allowed, -torch.inf)
        top = logits.amax(-1, keepdim=True).clamp(min=-1e300)
        p = (logits - top).exp()
        rounded = (p * LARGEST_P).float().to(torch.float8_e4m3fn).double() / LARGEST_P
        p, rounded = (x / p.sum(-1, keepdim=True).clamp(min=1e-300) for x in (p, rounded))
        largest = logits.abs().masked_fill(~self.allowed, 0.0).amax(-1, keepdim=True)
        of_logits = SUM_EPSILON * q.shape[-1] ** 0.5 * largest
        out, of_p = (torch.einsum("bhqk,bkhd->bqhd", x, v) for x in (p, rounded))
        of_sums = torch.einsum("bhqk,bkhd->bqhd", (p * of_logits) ** 2, v**2).sqrt()
        return Expected(out, logits.logsumexp(-1), of_p - out, of_sums, of_logits[..., 0])


class Expected(NamedTuple):
    """Exact attention, and errors that no kernel can avoid."""

    out: Any
    lse: Any
    #: Of O, if P is rounded to e4m3.
    of_p: Any
    #: Of O, by the 14 bits of Q K^T: each of the products in a sum loses part of the last one, in either direction.
    of_sums: Any
    #: Of logits, for each row, by the same.
    of_logits: Any


def judge(problem: Problem, out: Any, lse: Any) -> None:
    expected = problem.expected()
    near = out.double() - expected.out
    assert near.norm() <= 1.5 * (expected.of_p.norm() + expected.of_sums.norm() + 2.0**-9 * expected.out.norm())
    # No element is far off, either: a wrong tile of a long problem hardly shows in the norm.
    assert near.abs().max() <= 4 * (expected.of_p.abs() + expected.of_sums).max() + 2.0**-7 * expected.out.abs().max()
    assert torch.equal(lse == -torch.inf, expected.lse == -torch.inf)
    off = (lse.double() - expected.lse).masked_fill(lse == -torch.inf, 0.0).abs()
    assert (off <= 1e-2 + 1e-3 * expected.lse.abs() + 3 * expected.of_logits).all()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("len_q", "len_kv"), [(1000, 1111), (333, 77), (1, 2000)])
def test_it_is_as_near_to_exact_attention_as_rounded_p_allows(dim: int, mask: str, len_q: int, len_kv: int) -> None:
    problem = Problem(dim, len_q, len_kv, mask)
    judge(problem, *problem.call())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_blocks_of_rows_have_scales_of_their_own(dim: int, block: int, mask: str) -> None:
    problem = Problem(dim, 777, 900, mask, block)
    judge(problem, *problem.call(out_dtype=torch.float16))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_as_exact_as_those_alone(dim: int, causal: bool) -> None:
    problems = [Problem(dim, length, length, "causal" if causal else "full") for length in (300, 1, 1025, 128)]
    for problem in problems:
        # FlashAttention-3 has scales of groups.
        problem.scales[0] = problem.scales[1].repeat_interleave(HEADS // HEADS_KV, 1)
    # Two of each length, and one of length 0 in their midst.
    lengths = [300, 300, 1, 1, 0, 1025, 1025, 128, 128]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v = (torch.cat([getattr(x, name).flatten(0, 1) for x in problems]) for name in "qkv")
    k_scale, v_scale = (torch.cat([x.scales[i] for x in problems]) for i in (1, 2))
    k_scale, v_scale = (torch.cat([x[:4], x[:1], x[4:]]) for x in (k_scale, v_scale))
    named = {"q_descale": k_scale, "k_descale": k_scale, "v_descale": v_scale}
    longest = max(lengths)
    out, lse = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, starts, starts, longest, longest, causal=causal, return_attn_probs=True, **named
    )
    first = 0
    for problem in problems:
        batch, length = problem.q.shape[:2]
        rows = slice(first, first + batch * length)
        own_lse = lse[:, rows].view(HEADS, batch, length).transpose(0, 1)
        judge(problem, out[rows].view(batch, length, HEADS, dim), own_lse)
        first = rows.stop


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_sums_are_as_exact_as_short_ones(dim: int) -> None:
    """All values are equal, and so is O. Accumulators of tensor cores alone would lose several percent."""
    torch.manual_seed(0)
    q, k = eighths(1, 256, HEADS, dim), eighths(1, 16384, HEADS, dim)
    v = torch.full(k.shape, 1.75, device=DEVICE).to(torch.float8_e4m3fn)
    out = fg.attention(q, k, v)
    torch.testing.assert_close(out, torch.full_like(out, 1.75), atol=0, rtol=2**-7)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_logits_may_grow_along_the_keys(dim: int) -> None:
    problem = Problem(dim, 300, 2000, "full")
    along = torch.linspace(-1, 1, 2000, device=DEVICE)[None, :, None]
    for first in (along, -along):
        q, k = problem.q.float(), problem.k.float()
        q[..., 0], k[..., 0] = 16, first * dim**0.5 * 3
        problem.q, problem.k = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
        judge(problem, *problem.call())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("at", [0, 2000, 3999])
def test_many_small_probabilities_count_beside_a_large_one(dim: int, at: int) -> None:
    """As in rows with an attention sink."""
    problem = Problem(dim, 300, 4000, "full")
    q, k, v = problem.q.float(), problem.k.float() * 0.3, problem.v.float() + 1
    q[..., 0], k[..., 0] = 16, 0
    k[:, at, :, 0] = 10 * dim**0.5 / 16
    problem.q, problem.k, problem.v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    problem.scales = [torch.ones_like(x) for x in problem.scales]
    judge(problem, *problem.call())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_call_gives_the_same_bits(dim: int, mask: str) -> None:
    problem = Problem(dim, 4096, 4096, mask, heads=16)
    first = problem.call()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(problem.call(), first, strict=True))


@pytest.mark.parametrize(("dim", "tiles"), [(64, (192, 96)), (128, (128, 96)), (128, (128, 64)), (256, (128, 64))])
def test_other_tiles_are_as_near(dim: int, tiles: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these tiles are those of the kernel for sm_90a")
    problem = Problem(dim, 1000, 1111, "full")
    spec = fg.AttentionSpec(dim, head_dim_v=dim, dtype="e4m3", direction="forward")
    kernel = fg.build(spec, fg.Schedule(tile_q=tiles[0], tile_kv=tiles[1], algorithm="fa3"))
    q_scale, k_scale, v_scale = problem.scales
    judge(problem, *kernel(problem.q, problem.k, problem.v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale))
