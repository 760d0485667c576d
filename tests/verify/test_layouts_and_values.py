from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from flashgen.spec import AttentionSpec, causal
from flashgen.verify import Case
from flashgen.verify.cases.huge_strides import HUGE_STRIDE_AXES
from flashgen.verify.cases.layouts import LAYOUTS, ORDINARY_LAYOUTS, laid_out

SPEC = AttentionSpec(16, dtype="fp32", mask=causal())
CASE = Case("drawn", 20, 30, batch=2, heads=4, heads_kv=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 1), (0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8)])
def test_a_layout_holds_the_values_side_by_side_in_the_last_dimension(layout, shape):
    values = np.random.default_rng(0).standard_normal(shape)
    array = laid_out(values, layout, np.float16)
    assert array.shape == shape
    assert array.dtype == np.float16
    assert array.size == 0 or shape[3] == 1 or array.strides[3] == 2
    expected = values.astype(np.float16)
    if layout == "one-batch" and array.size:
        expected = np.broadcast_to(expected[-1:], shape)
    elif layout == "one-head" and array.size:
        expected = np.broadcast_to(expected[:, :, -1:], shape)
    np.testing.assert_array_equal(array, expected)


def test_layouts_are_as_their_names_say():
    strides = {layout: laid_out(np.zeros((2, 5, 3, 8)), layout, np.float16).strides for layout in ORDINARY_LAYOUTS}
    assert strides["contiguous"] == (240, 48, 16, 2)
    assert strides["heads-first"] == (240, 16, 80, 2)
    assert strides["wide-rows"] == (7 * 3 * 48, 3 * 48, 48, 2)
    assert strides["reversed"] == (240, -48, 16, 2)
    assert strides["one-batch"][0] == 0
    assert strides["one-head"][2] == 0
    assert strides["unaligned"] == (300, 60, 20, 2)
    assert laid_out(np.zeros((2, 5, 3, 8)), "unaligned", np.float16).ctypes.data % 4 == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("layout", HUGE_STRIDE_AXES)
def test_one_stride_of_a_huge_stride_layout_is_wrong_in_32_bits(layout, dtype):
    array = laid_out(np.zeros((2, 5, 3, 8)), layout, dtype)
    strides = [stride // array.itemsize for stride in array.strides]
    for bits in (2**31, 2**32):
        assert [stride >= bits for stride in strides] == [axis == HUGE_STRIDE_AXES[layout] for axis in range(4)]
    # As wide as kernels copy, so that nothing but the distance is unusual.
    assert strides[HUGE_STRIDE_AXES[layout]] * array.itemsize % 16 == 0


def test_what_32_bits_make_of_a_huge_offset_leads_to_another_value():
    """Backwards, forwards, or into a gap, which holds zeros: never out of what may be read, never to the right one."""
    values = np.arange(1, 241, dtype=np.float64).reshape(2, 5, 3, 8)
    array = laid_out(values, "huge-head-stride", np.float32)
    stride, place = array.strides[2] // 4, array.ctypes.data
    for offset in (ctypes.c_int32(stride).value, ctypes.c_uint32(2 * stride).value, -(2**31)):
        assert ctypes.c_float.from_address(place + 4 * offset).value not in values[0, 0, 1:, 0]


def test_without_address_space_an_array_with_a_huge_stride_is_contiguous_and_a_warning_says_so(monkeypatch, caplog):
    def refused(*arguments):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("flashgen.verify.cases.huge_strides.mmap.mmap", refused)
    values = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    with caplog.at_level("WARNING", "flashgen"):
        array = laid_out(values, "huge-head-stride", np.float32)
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, values)
    assert "NOT CHECKED: a stride of 2^32 elements, because 64 GiB of address space" in caplog.text


@pytest.mark.parametrize("layout", ["wide-rows", "unaligned"])
def test_what_lies_between_the_rows_is_nan(layout):
    array = laid_out(np.zeros((2, 5, 3, 8)), layout, np.float16)
    whole = array
    while whole.base is not None:
        whole = whole.base
    assert np.isnan(whole).sum() == whole.size - array.size


@pytest.mark.parametrize("fill", ["large_logits", "huge"])
@pytest.mark.parametrize("scale", [None, 1.0, 0.01])
def test_large_logits_are_near_a_million_and_exact_in_float32(fill, scale):
    case = replace(CASE, fill=fill, scale=scale)
    x, factor = case.inputs(SPEC), case.scale_for(SPEC)
    product = np.einsum("bqhd,bkhd->bhqk", x.q[:, :, ::2].astype(np.float64), x.k.astype(np.float64))
    assert np.array_equal(product, np.einsum("bqhd,bkhd->bhqk", x.q[:, :, ::2], x.k))
    logits = np.abs(product * factor)
    assert min(2e5, 2**22 * factor) <= logits.min() <= logits.max() < 1.1e6


def test_other_values_are_as_their_names_say():
    filled = {fill: replace(CASE, fill=fill).inputs(SPEC) for fill in ("normal", "spread", "flat", "sparse")}
    assert 0.9 < filled["normal"].q.std() < 1.1
    assert 5 < filled["spread"].q.std() < 7
    assert 0.9 < filled["spread"].v.std() < 1.1
    assert {float(x) for x in filled["flat"].k.ravel()} == {0.5}
    assert 0.8 < (filled["sparse"].v == 0).mean() < 0.97


def test_non_finite_values_lie_where_the_case_says():
    found = {"keys": np.zeros(4, bool), "queries": np.zeros(4, bool), "nothing": np.zeros(4, bool)}
    for where, places in found.items():
        for seed in range(20):
            x = replace(CASE, non_finite=where, seed=seed).inputs(SPEC)
            places |= [not np.isfinite(a).all() for a in (x.q, x.k, x.v, x.do)]
    assert found["keys"].tolist() == [False, True, True, False]
    assert found["queries"].tolist() == [True, False, False, True]
    assert not found["nothing"].any()


def test_nan_in_a_query_is_not_held_against_the_gradients_of_keys():
    assert CASE.compared == ("o", "lse", "dq", "dk", "dv")
    assert replace(CASE, non_finite="queries").compared == ("o", "lse", "dq")


def test_the_gradient_of_lse_is_float32_and_there_only_if_it_is_asked_for():
    dlse = replace(CASE, dlse=True).inputs(SPEC).dlse
    assert (dlse.shape, dlse.dtype) == ((2, 4, 20), np.float32)
    assert 2 < dlse.std() < 4
    assert CASE.inputs(SPEC).dlse is None
    assert replace(CASE, dlse=True).inputs(replace(SPEC, direction="forward")).dlse is None


@pytest.mark.parametrize("fill", ["hidden_nan", "huge", "large_logits", "sparse"])
@pytest.mark.parametrize("sizes", [{"len_q": 0}, {"len_kv": 0}, {"batch": 0}, {"heads": 0, "heads_kv": 0}])
def test_empty_arrays_can_hold_any_values(fill, sizes):
    x = replace(CASE, fill=fill, non_finite="keys", **sizes).inputs(SPEC)
    assert x.q.size * x.k.size == 0
