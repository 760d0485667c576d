"""8-bit queries, keys and values on the emulator: exact codes, scales, and what does not reach a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify import verify
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

ARCHS = ("sm_89", "sm_90a", "sm_120")
#: Every code but the two of NaN.
NUMBERS = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
E4M3 = fg.AttentionSpec(16, dtype="e4m3", direction="forward").element.numpy()
NAN = np.uint8(0x7F).view(E4M3)


def kernel_of(dim: int = 64, arch: str = "sm_89", **fields: Any) -> fg.Kernel:
    spec = fg.AttentionSpec(dim, **{"dtype": "e4m3", "direction": "forward", **fields})
    return fg.build(spec, arch=arch, target="emulator")


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(E4M3)


def scales_of(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).uniform(0.25, 2.0, shape).astype(np.float32)


def assert_close(found: tuple[Any, ...], spec: fg.AttentionSpec, q: Any, k: Any, v: Any, **scales: Any) -> None:
    """Within the bounds that the oracle sets for these inputs."""
    o, lse = found
    exact = oracle.forward(spec, q, k, v, **scales)
    limits = oracle.bounds(spec, q, k, v, scales=scales, exact=exact)
    assert oracle.check(o.astype(np.float64), exact[0], limits.o).ok
    assert oracle.check(lse.astype(np.float64), exact[1], limits.lse).ok


@pytest.mark.parametrize("arch", some(ARCHS, "sm_89"))
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
def test_every_code_of_a_value_reaches_the_result_exactly(arch: str, out_dtype: str) -> None:
    kernel = kernel_of(256, arch, out_dtype=out_dtype)
    values = np.resize(NUMBERS, 256).view(E4M3).reshape(1, 1, 1, 256)
    zeros = np.zeros_like(values)
    out, _ = kernel(zeros, zeros, values, v_scale=0.5)
    want = (values.astype(np.float64) * 0.5).astype(kernel.spec.out_element.numpy())
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("arch", some(ARCHS, "sm_89"))
def test_every_code_of_a_query_and_of_a_key_reaches_the_logit(arch: str) -> None:
    kernel = kernel_of(32, arch)
    # Sequence i has one key, whose first element meets that of one query.
    codes = np.zeros((len(NUMBERS), 1, 1, 32), np.uint8)
    codes[:, 0, 0, 0] = NUMBERS
    ones = np.zeros_like(codes)
    ones[..., 0] = 0x38
    for q, k in ((codes, ones), (ones, codes)):
        _, lse = kernel(q.view(E4M3), k.view(E4M3), ones.view(E4M3), scale=1.0, q_scale=0.25, k_scale=2.0)
        # Neighboring codes are 1e-3 apart and more.
        np.testing.assert_allclose(lse.ravel(), 0.5 * NUMBERS.view(E4M3).astype(np.float32), rtol=1e-6, atol=1e-6)


SHAPES = {"none": None, "tensor": (), "one": (1,), "heads": "heads", "sequences and heads": "all"}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("is_view", [False, True])
def test_scales_may_have_any_of_their_shapes_and_strides(kind: str, is_view: bool) -> None:
    kernel, batch, heads = kernel_of(32, mask=fg.causal()), 2, {"q": 4, "k": 2, "v": 2}
    arrays = {x: normal(i, batch, 40 + 30 * (x != "q"), n, 32) for i, (x, n) in enumerate(heads.items())}
    scales = {}
    for i, (x, n) in enumerate(heads.items()):
        shape = {"heads": (n,), "all": (batch, n)}.get(SHAPES[kind], SHAPES[kind])  # type: ignore[arg-type]
        if shape is not None:
            whole = scales_of(i, *shape)
            scales[f"{x}_scale"] = np.repeat(whole, 3, axis=-1)[..., ::3] if is_view and whole.ndim else whole
    assert_close(kernel(*arrays.values(), **scales), kernel.spec, *arrays.values(), **scales)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("arch", some(ARCHS, "sm_89"))
def test_each_block_of_rows_has_a_scale(block: int, arch: str) -> None:
    kernel = kernel_of(64, arch, scale_block=block, mask=fg.window(100, 0))
    q, k, v = normal(0, 1, 300, 2, 64), normal(1, 1, 290, 1, 64), normal(2, 1, 290, 1, 64)
    scales = {
        f"{x}_scale": scales_of(i, 1, n, -(-300 // block)) for i, (x, n) in enumerate([("q", 2), ("k", 1), ("v", 1)])
    }
    assert_close(kernel(q, k, v, **scales), kernel.spec, q, k, v, **scales)


def test_sequences_that_are_packed_begin_blocks_of_scales() -> None:
    kernel = kernel_of(32, scale_block=64, varlen=True, mask=fg.causal())
    starts_q, starts_k = np.array([0, 70, 70, 200], np.int32), np.array([0, 30, 130, 330], np.int32)
    q, k, v = normal(0, 210, 2, 32), normal(1, 330, 2, 32), normal(2, 330, 2, 32)
    scales = [scales_of(i, 2, n // 64 + 3) for i, n in enumerate((210, 330, 330))]
    names = ("q_scale", "k_scale", "v_scale")
    sequences = fg.Sequences(starts_q, starts_k, 130, 200)
    out, lse = kernel(q, k, v, sequences=sequences, **dict(zip(names, scales, strict=True)))
    dense = kernel_of(32, scale_block=64, mask=fg.causal())
    for i in range(3):
        own = []
        for starts, scale in zip((starts_q, starts_k, starts_k), scales, strict=True):
            first, last = int(starts[i]), int(starts[i + 1])
            number = first // 64 + i
            own.append((slice(first, last), scale[None, :, number : number + -(-(last - first) // 64)]))
        rows, of_rows = zip(*own, strict=True)
        alone = dense(q[None, rows[0]], k[None, rows[1]], v[None, rows[2]], **dict(zip(names, of_rows, strict=True)))
        np.testing.assert_array_equal(out[rows[0]], alone[0][0])
        np.testing.assert_array_equal(lse[:, rows[0]], alone[1][0])
    # Rows behind the last sequence.
    assert not out[200:].any()
    assert (lse[:, 200:] == -np.inf).all()


def test_scores_take_the_logits_that_scales_make() -> None:
    score = (
        fg.softcap(2.0) >> fg.Score.of(lambda s, b, h, q, k: s + 0.1 * h) >> fg.sink(np.array([0.3, -0.4], np.float32))
    )
    kernel = kernel_of(64, scale_block=64, score=score)
    q, k, v = normal(0, 1, 70, 2, 64), normal(1, 1, 130, 2, 64), normal(2, 1, 130, 2, 64)
    scales = {
        f"{x}_scale": scales_of(i, 1, 2, -(-n // 64)) for i, (x, n) in enumerate([("q", 70), ("k", 130), ("v", 130)])
    }
    assert_close(kernel(q, k, v, **scales), kernel.spec, q, k, v, **scales)


@pytest.mark.parametrize("mask", [fg.causal(), fg.Mask.of(lambda b, h, q, k: (k <= q) & (k % 2 == 0))])
@pytest.mark.parametrize("dim", [48, 128])
def test_nan_in_a_key_or_value_reaches_no_row_that_may_not_attend_to_it(mask: fg.Mask, dim: int) -> None:
    kernel = kernel_of(dim, mask=mask)
    q, k, v = normal(0, 1, 100, 2, dim), normal(1, 1, 100, 1, dim), normal(2, 1, 100, 1, dim)
    clean, clean_lse = kernel(q, k, v)
    k[0, 71, 0, 3], v[0, 61, 0, 5], v[0, 90, 0, 2] = NAN, NAN, NAN
    out, lse = kernel(q, k, v)
    exact, exact_lse = oracle.forward(kernel.spec, q, k, v)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(exact_lse))
    # Of a row in the tile of such a value, finite results may be rounded otherwise.
    np.testing.assert_array_equal(out[:, :61], clean[:, :61])
    np.testing.assert_array_equal(lse[0, :, :61], clean_lse[0, :, :61])


@pytest.mark.parametrize("offset", some((1, 2, 3, 4, 8), 1, 2))
def test_rows_may_begin_at_any_byte(offset: int) -> None:
    kernel = kernel_of(32, mask=fg.causal())
    arrays = [normal(i, 1, 70, 2, 32) for i in range(3)]
    moved = []
    for x in arrays:
        wide = np.zeros((*x.shape[:-1], 32 + offset), E4M3)
        wide[..., offset:] = x
        moved.append(wide[..., offset:])
    for found, want in zip(kernel(*moved), kernel(*arrays), strict=True):
        np.testing.assert_array_equal(found, want)


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    kernel = kernel_of(32, mask=fg.causal())
    q, k, v = normal(0, 1, 10, 1, 32), normal(1, 1, 4, 1, 32), normal(2, 1, 4, 1, 32)
    out, lse = kernel(q, k, v)
    assert not out[:, :6].any()
    assert (lse[..., :6] == -np.inf).all()
    assert np.isfinite(lse[..., 6:]).all()
    for shape in ((1, 0, 1, 32), (0, 4, 1, 32)):
        empty, _ = kernel(np.zeros(shape, E4M3), k[: shape[0]], v[: shape[0]])
        assert empty.shape == shape


def test_results_are_reproducible_and_do_not_depend_on_the_order_of_threads() -> None:
    kernel = kernel_of(64, scale_block=64, mask=fg.causal())
    q, k, v = (normal(i, 1, 200, 2, 64) for i in range(3))
    first = kernel(q, k, v)
    kernel.target.options = {"schedule": "random", "seed": 11}  # type: ignore[attr-defined]
    try:
        second = kernel(q, k, v)
    finally:
        kernel.target.options = {}  # type: ignore[attr-defined]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_long_rows_lose_nothing_of_many_small_terms() -> None:
    """Tensor cores add 8-bit products with few bits: each tile of keys has a sum of its own."""
    kernel = kernel_of(16)
    zeros, value = np.zeros((1, 16, 1, 16), E4M3), np.full((1, 8192, 1, 16), 1.125, E4M3)
    out, lse = kernel(zeros, np.zeros_like(value), value)
    np.testing.assert_array_equal(out.astype(np.float32), 1.125)
    np.testing.assert_allclose(lse, np.log(8192), rtol=1e-6)


def test_slopes_and_bounds_of_the_standard_cases_hold() -> None:
    kernel = kernel_of(64, mask=fg.causal())

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, **more: Any) -> Any:
        return kernel(q, k, v, scale=scale, **more)

    found = verify(run, kernel.spec)
    assert found.ok, found
    assert {report.output for report in found.outputs} == {"o", "lse"}
    assert all(report.slope.ok for report in found.outputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_scale": 0.0}, "q_scale=0.0 must be an array or a finite number above 0"),
        ({"k_scale": float("nan")}, "k_scale=nan must be an array or a finite number above 0"),
        ({"v_scale": np.ones(3, np.float32)}, r"v_scale is fp32 of shape \(3,\); pass float32 of shape \(\) or \(1,\)"),
        ({"q_scale": np.ones((2, 2), np.float16)}, r"q_scale is fp16 of shape \(2, 2\); pass float32"),
        ({"q_scale": 1e30, "k_scale": 1e30}, r"q_scale=1e\+30 times k_scale=1e\+30 must be"),
    ],
)
def test_scales_that_are_none_are_refused(change: dict[str, Any], words: str) -> None:
    kernel = kernel_of(32)
    q, k, v = (normal(i, 2, 8, 2, 32) for i in range(3))
    with pytest.raises(fg.ArgumentError, match=words):
        kernel(q, k, v, **change)


def test_kernels_of_other_dtypes_take_no_scales() -> None:
    kernel = kernel_of(32, dtype="fp16")
    x = np.zeros((1, 4, 1, 32), np.float16)
    with pytest.raises(fg.ArgumentError, match="q_scale"):
        kernel(x, x, x, q_scale=1.0)
