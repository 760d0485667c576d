"""float8 queries, keys and values on a GPU: masks, lengths, shapes of scales, and FlashAttention-3's call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

#: (head_dim, head_dim_v, out_dtype): those of tables of tiles, and between them.
DIMS = [
    (16, 16, torch.bfloat16),
    (64, 64, torch.float16),
    (80, 48, torch.bfloat16),
    (128, 128, torch.bfloat16),
    (192, 128, torch.float16),
    (256, 256, torch.bfloat16),
]
MASKS = {"full": None, "causal": fg.causal(), "window": fg.window(300, 0)}
LENGTHS = [(1, 1), (63, 130), (257, 1000), (1024, 1024), (2000, 77)]


@pytest.fixture(autouse=True)
def needs_eight_bits() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs sm_89 or later")


def codes(seed: int, *shape: int) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.float8_e4m3fn)


def scales(seed: int, *shape: int) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(shape, generator=generator, device="cuda") + 0.5


def wide(x: Any, scale: Any, block: int | None) -> Any:
    """The numbers that codes (batch, length, heads, dim) stand for."""
    if block is not None:
        return x.double() * scale.repeat_interleave(block, 2)[:, :, : x.shape[1]].transpose(1, 2)[..., None]
    return x.double() * scale[:, None, :, None]


def exact(q: Any, k: Any, v: Any, allowed: Any) -> tuple[Any, Any]:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    logits = logits.masked_fill(~allowed, -torch.inf)
    lse = logits.logsumexp(-1)
    return torch.einsum("bhqk,bkhd->bqhd", (logits - lse[..., None]).exp().nan_to_num(0.0), v), lse


def allowed_pairs(name: str, len_q: int, len_kv: int) -> Any:
    distance = torch.arange(len_kv, device="cuda")[None] - torch.arange(len_q, device="cuda")[:, None] - len_kv + len_q
    return {"full": distance == distance, "causal": distance <= 0, "window": (distance <= 0) & (distance >= -300)}[name]


def assert_close(found: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    out, lse = found
    # P has 3 bits behind the leading one, so that an average of values is off by at most half a sixteenth of them.
    assert (out.double() - want[0]).abs().max() <= 2**-5 * want[0].abs().max() + 0.06
    rows = torch.isfinite(want[1])
    assert torch.equal(torch.isfinite(lse), rows)
    # Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, and wide heads sum more of them.
    assert torch.allclose(lse.double()[rows], want[1][rows], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("dim", "dim_v", "out_dtype"), DIMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", [None, 64, 128])
def test_attention_is_that_of_the_scaled_numbers(dim: int, dim_v: int, out_dtype: Any, mask: str, block: Any) -> None:
    for seed, (len_q, len_kv) in enumerate(LENGTHS):
        q, k, v = (
            codes(seed, 2, len_q, 4, dim),
            codes(seed + 9, 2, len_kv, 2, dim),
            codes(seed + 18, 2, len_kv, 2, dim_v),
        )
        of = [
            scales(i, x.shape[0], x.shape[2], *([-(-x.shape[1] // block)] if block else []))
            for i, x in enumerate((q, k, v))
        ]
        named = dict(zip(("q_scale", "k_scale", "v_scale"), of, strict=True))
        found = fg.attention(
            q, k, v, mask=MASKS[mask], return_lse=True, scale_block=block, out_dtype=out_dtype, **named
        )
        assert found[0].dtype == out_dtype
        numbers = [wide(x, scale, block) for x, scale in zip((q, k, v), of, strict=True)]
        assert_close(found, exact(*numbers, allowed_pairs(mask, len_q, len_kv)))


def test_every_code_of_a_value_reaches_the_result_exactly() -> None:
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor(np.resize(numbers, 256), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    values = values.view(1, 1, 1, 256)
    zeros = torch.zeros_like(values)
    out = fg.attention(zeros, zeros, values, v_scale=0.5, out_dtype=torch.float16)
    assert torch.equal(out.float(), values.float() * 0.5)


def test_packed_sequences_are_those_alone() -> None:
    q, k, v = codes(0, 1000, 4, 128), codes(1, 1300, 2, 128), codes(2, 1300, 2, 128)
    starts_q = torch.tensor([0, 70, 70, 1000], dtype=torch.int32, device="cuda")
    starts_k = torch.tensor([0, 300, 500, 1300], dtype=torch.int32, device="cuda")
    sequences = fg.Sequences(starts_q, starts_k, 930, 800)
    named = {f"{x}_scale": scales(i, 3, 4 if x == "q" else 2) for i, x in enumerate("qkv")}
    out = fg.attention(q, k, v, mask=fg.causal(), sequences=sequences, **named)
    for i in (0, 2):
        rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
        own = {name: x[i : i + 1] for name, x in named.items()}
        alone = fg.attention(q[None, rows], k[None, keys], v[None, keys], mask=fg.causal(), **own)
        # Tiles of packed sequences may be others.
        assert (out[rows].float() - alone[0].float()).abs().max() < 0.05


def test_flash_attn_interface_takes_descales() -> None:
    from flashgen.compat.flash_attn_interface import flash_attn_func

    q, k, v = codes(0, 2, 500, 4, 128), codes(1, 2, 700, 2, 128), codes(2, 2, 700, 2, 128)
    named = {f"{x}_descale": scales(i, 2, 2) for i, x in enumerate("qkv")}
    found = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **named)
    of = [named["q_descale"].repeat_interleave(2, 1), named["k_descale"], named["v_descale"]]
    numbers = [wide(x, scale, None) for x, scale in zip((q, k, v), of, strict=True)]
    assert_close(found, exact(*numbers, allowed_pairs("causal", 500, 700)))


def test_results_are_reproducible_and_graphs_replay_them() -> None:
    q, k, v = (codes(i, 1, 3000, 4, 128) for i in range(3))
    first = fg.attention(q, k, v, mask=fg.causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fg.attention(q, k, v, mask=fg.causal())
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, first)


def test_a_nan_that_no_query_may_attend_to_reaches_none() -> None:
    q, k, v = (codes(i, 1, 600, 2, 64) for i in range(3))
    k[0, 500, 0, 3], v[0, 400, 1, 5] = torch.nan, torch.nan
    out = fg.attention(q, k, v, mask=fg.causal())
    assert torch.isfinite(out[:, :400]).all()
    assert torch.isnan(out[0, 500:, 0]).all()
    assert torch.isnan(out[0, 400:, 1, 5]).all()
