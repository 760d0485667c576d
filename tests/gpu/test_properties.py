"""Random problems against the oracle: lengths, heads, layouts, scales and magnitudes, for several specs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SPECS = [
    fg.AttentionSpec(128, dtype="bf16", mask=fg.causal()),
    fg.AttentionSpec(128, dtype="fp16"),
    fg.AttentionSpec(64, dtype="bf16", mask=fg.causal(), deterministic=True),
    fg.AttentionSpec(64, dtype="fp16", mask=fg.window(50, 20)),
    fg.AttentionSpec(64, dtype="fp32", mask=fg.causal()),
    fg.AttentionSpec(96, dtype="bf16", mask=fg.causal("top-left")),
    fg.AttentionSpec(256, dtype="bf16", mask=fg.causal()),
    fg.AttentionSpec(192, head_dim_v=128, dtype="bf16", mask=fg.causal()),
    fg.AttentionSpec(192, dtype="fp16", mask=fg.window(50, 20), deterministic=True),
    fg.AttentionSpec(40, dtype="fp16", mask=fg.window(30, 0), deterministic=True),
    fg.AttentionSpec(16, dtype="bf16"),
    fg.AttentionSpec(80, head_dim_v=48, dtype="fp16", mask=fg.causal() & fg.window(64, None, align="top-left")),
    fg.AttentionSpec(33, head_dim_v=7, dtype="bf16", mask=fg.causal()),
    fg.AttentionSpec(1, dtype="fp32"),
    fg.AttentionSpec(128, dtype="bf16", mask=fg.causal(), dropout=True),
    fg.AttentionSpec(64, dtype="fp16", dropout=True, deterministic=True),
    fg.AttentionSpec(40, dtype="fp32", mask=fg.causal(), dropout=True),
    fg.AttentionSpec(128, dtype="bf16", mask=fg.causal(), varlen=True),
    fg.AttentionSpec(64, dtype="fp16", mask=fg.window(30, 5), varlen=True, dropout=True, deterministic=True),
    fg.AttentionSpec(64, dtype="bf16", varlen=True),
    fg.AttentionSpec(128, dtype="fp16", varlen=True, dropout=True),
    fg.AttentionSpec(256, dtype="bf16", mask=fg.causal(), varlen=True, dropout=True),
    fg.AttentionSpec(96, dtype="bf16", mask=fg.causal(), varlen=True, deterministic=True),
    fg.AttentionSpec(160, dtype="fp32", mask=fg.window(0, 5)),
]


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    lengths = st.one_of(st.integers(0, 4), st.integers(1, 260), st.sampled_from([63, 64, 65, 127, 128, 129, 256]))
    layouts = st.sampled_from(["contiguous", "contiguous", "heads first", "wide rows", "unaligned", "one batch"])
    return {
        "batch": draw(st.sampled_from([1, 2, 2, 3, 0])),
        "len_q": draw(lengths),
        "len_kv": draw(lengths),
        "heads_kv": draw(st.integers(1, 2)),
        "group": draw(st.sampled_from([1, 1, 2, 3])),
        "layouts": [draw(layouts) for _ in range(4)],
        "scale": draw(st.sampled_from([None, None, 1.0, 0.01])),
        "size": draw(st.sampled_from([1.0, 1.0, 0.1, 8.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.describe())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=problems())
def test_every_result_is_within_its_bound(
    spec: fg.AttentionSpec, problem: dict[str, Any], maker: Any, verify: Any
) -> None:
    make = maker(problem["seed"])
    batch, len_q, len_kv = problem["batch"], problem["len_q"], problem["len_kv"]
    heads_kv, heads = problem["heads_kv"], problem["heads_kv"] * problem["group"]
    layout_q, layout_k, layout_v, layout_do = problem["layouts"]
    size = problem["size"]
    q = make(spec, batch, len_q, heads, spec.head_dim, layout=layout_q, size=size)
    k = make(spec, batch, len_kv, heads_kv, spec.head_dim, layout=layout_k, size=size)
    v = make(spec, batch, len_kv, heads_kv, spec.head_dim_v, layout=layout_v)
    do = make(spec, batch, len_q, heads, spec.head_dim_v, layout=layout_do)
    verify(spec, q, k, v, do, problem["scale"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim_and_dtype(dtype: str, head_dim: int, causal: bool, make: Any, verify: Any) -> None:
    spec = fg.AttentionSpec(head_dim, dtype=dtype, mask=fg.causal() if causal else fg.full())
    q, do = (make(spec, 2, 203, 4, head_dim) for _ in range(2))
    k, v = (make(spec, 2, 190, 2, head_dim) for _ in range(2))
    verify(spec, q, k, v, do)


@pytest.mark.parametrize("partition", ["split_q", "split_k"])
@pytest.mark.parametrize("warps", [2, 4])
def test_both_warp_partitions(partition: Any, warps: int, make: Any, judge: Any) -> None:
    spec = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal(), direction="forward")
    schedule = fg.Schedule(tile_q=64, tile_kv=64, warps=fg.WarpPartition(partition, warps))
    q, k, v = make(spec, 2, 150, 4, 64), make(spec, 2, 170, 2, 64), make(spec, 2, 170, 2, 64)
    judge(spec, q, k, v, None, None, fg.build(spec, schedule)(q, k, v))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("mask", [fg.full(), fg.causal(), fg.window(100, 20)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "unaligned"])
def test_standard_attention(dtype: str, head_dim: int, mask: fg.Mask, layout: str, make: Any, judge: Any) -> None:
    spec, schedule = fg.AttentionSpec(head_dim, dtype=dtype, mask=mask), fg.Schedule(algorithm="standard")
    q, do = (make(spec, 2, 203, 4, head_dim, layout=layout) for _ in range(2))
    k, v = (make(spec, 2, 301, 2, head_dim, layout=layout) for _ in range(2))
    kernel = fg.build(spec, schedule)
    out, lse, p = kernel(q, k, v, return_p=True)
    gradients = kernel.backward(do, q, k, v, out, lse, p=p)
    judge(spec, q, k, v, do, None, (out, lse, *gradients))
    for one, other in zip(gradients, kernel.backward(do, q, k, v, out, lse), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ["naive", "fa1", "grid1d", "grid2d"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("head_dim", "layout"), [(40, "contiguous"), (64, "unaligned"), (128, "contiguous")])
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=str)
@pytest.mark.parametrize("batch", [1, 40])
def test_algorithms_before_flash_attention_2(
    algorithm: str, dtype: str, head_dim: int, layout: str, mask: fg.Mask, batch: int, make: Any, judge: Any
) -> None:
    # The blocks of grid2d all run at once for one sequence, and do not for 40.
    spec = fg.AttentionSpec(head_dim, dtype=dtype, mask=mask, direction="both" if algorithm == "fa1" else "forward")
    kernel = fg.build(spec, fg.Schedule(algorithm=algorithm))
    q, do = (make(spec, batch, 203, 4, head_dim, layout=layout) for _ in range(2))
    k, v = (make(spec, batch, 301, 2, head_dim, layout=layout) for _ in range(2))
    out, lse = kernel(q, k, v)
    if not spec.needs_backward:
        judge(spec, q, k, v, None, None, (out, lse))
        return
    gradients = kernel.backward(do, q, k, v, out, lse)
    judge(spec, q, k, v, do, None, (out, lse, *gradients))
    for one, other in zip(gradients, kernel.backward(do, q, k, v, out, lse), strict=True):
        assert torch.equal(one, other)


def test_rows_of_standard_attention_that_registers_do_not_hold(make: Any, judge: Any) -> None:
    spec = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal())
    kernel = fg.build(spec, fg.Schedule(algorithm="standard"))
    q, do = (make(spec, 1, 130, 2, 64) for _ in range(2))
    k, v = (make(spec, 1, 9001, 1, 64) for _ in range(2))
    out, lse = kernel(q, k, v)
    judge(spec, q, k, v, do, None, (out, lse, *kernel.backward(do, q, k, v, out, lse)))
