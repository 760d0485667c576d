"""The kernel that makes e4m3 of 16-bit queries, keys and values, on the emulator: its bits are the oracle's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen import oracle
from flashgen.launch.quantizer import Quantized
from tests.drawn import LEVEL, some

EXAMPLES = {"sample": 6, "ci": 20, "nightly": 150}[LEVEL]
NAN = 0x7F
#: (head_dim, head_dim_v, block, out_dtype): groups of one lane and of several, heads of no power of two.
FORMS = [
    (128, 128, 128, "bf16"),
    (80, 32, 64, "fp16"),
    (256, 256, 64, "bf16"),
    (16, 64, 64, "bf16"),
    (64, 64, 128, "fp16"),
    (192, 128, 128, "bf16"),
]


def kernel_of(dim: int, dim_v: int, block: int, dtype: str, arch: str = "sm_89", **fields: Any) -> fg.Kernel:
    spec = fg.AttentionSpec(
        dim, head_dim_v=dim_v, dtype="e4m3", out_dtype=dtype, scale_block=block, direction="forward", **fields
    )
    return fg.build(spec, arch=arch, target="emulator")


def rows_of(random: Any, kernel: fg.Kernel, *shape: int) -> Any:
    """Normal numbers with some outliers, and few that are not finite."""
    x = random.standard_normal(shape) * np.exp(random.uniform(-3, 3, (*shape[:-1], 1)))
    x += 30 * random.standard_normal(shape) * (random.random(shape) < 1e-2)
    x[random.random(shape) < 1e-4] = random.choice([np.nan, np.inf, -np.inf])
    return x.astype(kernel.spec.out_element.numpy())


def of_dense(q: Any, k: Any, v: Any, block: int, rotate: bool) -> list[tuple[Any, Any]]:
    return [oracle.quantized_rows(x, block, rotate=turns) for x, turns in ((q, rotate), (k, rotate), (v, False))]


def assert_is(found: Quantized, wanted: list[tuple[Any, Any]]) -> None:
    for name, codes, scale, (want_codes, want_scale) in zip("qkv", found[:3], found[3:], wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want_codes, err_msg=name)
        np.testing.assert_array_equal(scale, want_scale, err_msg=f"scale of {name}")


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(some(FORMS, *FORMS[:2])),
    lengths=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    batch=st.integers(1, 2),
    rotate=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_codes_and_scales_are_those_of_the_oracle(
    form: Any, lengths: tuple[int, int], heads: tuple[int, int], batch: int, rotate: bool, seed: int
) -> None:
    kernel, random = kernel_of(*form), np.random.default_rng(seed)
    (dim, dim_v, block, _), (len_q, len_kv) = form, lengths
    q = rows_of(random, kernel, batch, len_q, heads[0], dim)
    k, v = (rows_of(random, kernel, batch, len_kv, heads[1], d) for d in (dim, dim_v))
    assert_is(kernel.quantize(q, k, v, rotate=rotate), of_dense(q, k, v, block, rotate))


@pytest.mark.parametrize("form", some(FORMS, *FORMS[:2]))
@pytest.mark.parametrize("options", [{"race": True}, {"schedule": "random", "seed": 7}, {"guard": "begin"}])
def test_it_is_right_in_every_order_and_has_no_races(form: Any, options: dict[str, Any]) -> None:
    kernel, random = kernel_of(*form), np.random.default_rng(3)
    q = rows_of(random, kernel, 1, 150, 2, form[0])
    k, v = (rows_of(random, kernel, 1, 70, 1, d) for d in form[:2])
    k[0, 3, 0, 1] = np.inf  # the second bound, too
    kernel.target.options = options  # type: ignore[attr-defined]
    try:
        assert_is(kernel.quantize(q, k, v), of_dense(q, k, v, form[2], True))
    finally:
        kernel.target.options = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["heads first", "odd rows", "one element later", "shared batch"])
def test_any_strides_and_alignments_do(layout: str) -> None:
    kernel, random = kernel_of(*FORMS[0]), np.random.default_rng(4)

    def laid(heads: int) -> Any:
        x = rows_of(random, kernel, 2, 140, heads, 128)
        if layout == "heads first":
            return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
        if layout == "odd rows":
            wide = np.zeros((*x.shape[:3], 129), x.dtype)
            wide[..., :128] = x
            return wide[..., :128]
        if layout == "one element later":
            flat = np.zeros(x.size + 1, x.dtype)
            flat[1:] = x.ravel()
            return flat[1:].reshape(x.shape)
        return np.broadcast_to(x[:1], x.shape)

    q, k, v = laid(4), laid(2), laid(2)
    assert_is(kernel.quantize(q, k, v), of_dense(q, k, v, 128, True))


@pytest.mark.parametrize("is_partly_used", [False, True])
def test_packed_sequences_begin_blocks_and_other_rows_are_not_read(is_partly_used: bool) -> None:
    kernel, random = kernel_of(64, 64, 64, "bf16", varlen=True), np.random.default_rng(5)
    starts_q, starts_k = (np.array(x, np.int32) for x in ([2, 90, 90, 260], [0, 10, 150, 151]))
    used_q, used_k = (np.array(x, np.int32) for x in ([70, 0, 170], [10, 1, 0]))
    q, k, v = (rows_of(random, kernel, n, h, 64) for n, h in ((270, 4), (160, 2), (160, 2)))
    more = {"seqused_q": used_q, "seqused_k": used_k} if is_partly_used else {}
    sequences = fg.Sequences(starts_q, starts_k, 170, 140, **more)
    found = kernel.quantize(q, k, v, sequences=sequences)
    for x, codes, scale, starts, used, rotate in (
        (q, found.q, found.q_scale, starts_q, more.get("seqused_q"), True),
        (k, found.k, found.k_scale, starts_k, more.get("seqused_k"), True),
        (v, found.v, found.v_scale, starts_k, more.get("seqused_k"), False),
    ):
        # Outputs begin as NaN, so what is not written still is.
        want = oracle.quantized_packed_rows(x, starts, 64, rotate=rotate, used=used)
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want[0])
        np.testing.assert_array_equal(scale, want[1])


def test_numbers_that_e4m3_holds_stay_what_they_are() -> None:
    """Multiples of 64 up to 448 are e4m3 numbers."""
    kernel, random = kernel_of(32, 32, 64, "fp16"), np.random.default_rng(6)
    q, k, v = (random.integers(-7, 8, (1, 64, 1, 32)).astype(np.float16) for _ in "qkv")
    for x in (q, k, v):
        x[..., 0] = 7
    codes = kernel.quantize(q, k, v, rotate=False)
    for x, found, scale in zip((q, k, v), codes[:3], codes[3:], strict=True):
        held = oracle.dequantized_rows(np.asarray(found).view(np.uint8), np.asarray(scale), 64)
        np.testing.assert_allclose(held, x, rtol=1e-6)


@pytest.mark.parametrize("form", some(FORMS, FORMS[2]))
def test_zeros_and_equal_elements_have_the_codes_of_the_oracle(form: Any) -> None:
    """Sums of zeros, and of what cancels, have a sign."""
    kernel, (dim, dim_v, block, _) = kernel_of(*form), form

    def rows(heads: int, columns: int) -> Any:
        x = np.zeros((1, 3 * block, heads, columns), np.float32)
        x[:, block // 2 : block] = -0.0
        x[:, block : block + 40] = 1.5
        x[:, block + 20 :, :, ::3] = -0.0
        x[:, 2 * block :, :, 5] = -2.0
        return x.astype(kernel.spec.out_element.numpy())

    q, k, v = rows(2, dim), rows(1, dim), rows(1, dim_v)
    assert_is(kernel.quantize(q, k, v), of_dense(q, k, v, block, True))


def test_many_blocks_of_rows_are_those_of_the_oracle() -> None:
    """More than run at once, so that each block of threads quantizes several."""
    kernel, random = kernel_of(*FORMS[3]), np.random.default_rng(7)
    q = rows_of(random, kernel, 2, 2100, 1, 16)
    k, v = (rows_of(random, kernel, 2, 700, 1, d) for d in (16, 64))
    assert_is(kernel.quantize(q, k, v), of_dense(q, k, v, 64, True))


@pytest.mark.parametrize(("rows", "blocks"), [(320, 1), (640, 2), (6400, 4)])
def test_blocks_of_threads_take_several_blocks_of_rows_only_where_all_multiprocessors_work(
    rows: int, blocks: int
) -> None:
    kernel = kernel_of(64, 64, 64, "bf16")
    x = np.zeros((1, rows, 1, 64), kernel.spec.out_element.numpy())
    quantizer = kernel.executor.quantize
    assert quantizer is not None
    call = quantizer.find(x, x, x, True, None, None)[1]
    assert call.steps[0].grid == (-(-rows // (64 * blocks)), 3, 1)


def test_what_it_cannot_take_is_refused_in_a_sentence() -> None:
    kernel = kernel_of(*FORMS[0])
    x = np.zeros((1, 5, 1, 128), kernel.spec.out_element.numpy())
    with pytest.raises(fg.ArgumentError, match="q is fp32, but this kernel was built for bf16"):
        kernel.quantize(x.astype(np.float32), x, x)
    with pytest.raises(fg.ArgumentError, match="rotate=1 is not a bool; use True or False"):
        kernel.quantize(x, x, x, rotate=1)  # type: ignore[arg-type]
    with pytest.raises(fg.ArgumentError, match="sequences was given, but this kernel was built without"):
        kernel.quantize(x, x, x, sequences=fg.Sequences(x, x, 1, 1))
    without = fg.build(fg.AttentionSpec(128, dtype="e4m3", direction="forward"), arch="sm_89", target="emulator")
    with pytest.raises(fg.LaunchError, match="build one with scale_block=128 or 64"):
        without.quantize(x, x, x)


def test_an_infinity_leaves_the_codes_of_other_rows() -> None:
    kernel = kernel_of(*FORMS[0])
    x = np.ones((1, 128, 1, 128), kernel.spec.out_element.numpy())
    x[0, 5, 0, 3] = np.inf
    found = kernel.quantize(x, x, x, rotate=False)
    codes = np.asarray(found.v).view(np.uint8)
    assert codes[0, 5, 0, 3] == NAN
    assert (codes[0, 6] == 0x7E).all()
