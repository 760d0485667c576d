"""Every misuse is refused in a sentence, before anything is launched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.spec import KVCache, Sequences

GOOD = (2, 8, 4, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": ((8, 4, 64), {})}, "q has shape (8, 4, 64); it must have 4 dimensions"),
        ({"q": ((2, 8, 4, 32), {})}, "its head dimension is 32; this kernel was built for head_dim=64"),
        ({"k": ((2, 8, 4, 128), {})}, "k has shape (2, 8, 4, 128)"),
        ({"v": ((2, 8, 4, 32), {})}, "built for head_dim_v=64"),
        ({"k": ((3, 8, 4, 64), {}), "v": ((3, 8, 4, 64), {})}, "k has batch 3 and q has batch 2"),
        ({"v": ((2, 9, 4, 64), {})}, "v has 9 keys and k has 8"),
        ({"v": ((2, 8, 2, 64), {})}, "v has 2 heads and k has 4"),
        ({"k": ((2, 8, 3, 64), {}), "v": ((2, 8, 3, 64), {})}, "q has 4 heads and k has 3"),
        ({"k": ((2, 8, 0, 64), {}), "v": ((2, 8, 0, 64), {})}, "q has 4 heads and k has 0"),
        ({"q": (GOOD, {"dtype": "<f4"})}, "q is fp32, but this kernel was built for fp16"),
        ({"k": (GOOD, {"dtype": "<i2"})}, "k is <i2, but this kernel was built for fp16"),
        (
            {"q": (GOOD, {"strides": (2048, 256, 1, 4)})},
            "q has strides (2048, 256, 1, 4); the last one must be 1",
        ),
        ({"v": (GOOD, {"device": 1})}, "v is on cuda:1 and q on cuda:0"),
        ({"k": (GOOD, {"offset": 1})}, "k starts at an address that is no multiple of its element size"),
        ({"k": ((2, 2**31, 4, 64), {}), "v": ((2, 2**31, 4, 64), {})}, "every dimension must be below 2^31"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(bench: Any, array: Any, change: Any, words: str) -> None:
    b = bench(64)
    made = {name: array(*GOOD) for name in "qkv"}
    made |= {name: array(*shape, **options) for name, (shape, options) in change.items()}
    with pytest.raises(ArgumentError) as error:
        b.executor.forward(made["q"], made["k"], made["v"])
    assert words in str(error.value)
    assert b.driver.launches == []


def test_all_complaints_come_at_once(bench: Any, array: Any) -> None:
    b = bench(64)
    with pytest.raises(ArgumentError) as error:
        b.executor.forward(array(*GOOD, dtype="<f4"), array(8, 4, 64), array(*GOOD, device=1))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-50, 1e39, True, "1", [0.5], np.array([1.0])])
def test_a_scale_that_is_no_positive_number_is_refused(bench: Any, array: Any, scale: object) -> None:
    x = array(*GOOD)
    with pytest.raises(ArgumentError, match="scale="):
        bench(64).executor.forward(x, x, x, scale)


@pytest.mark.parametrize("scale", [1, 0.5, np.float32(0.5), np.float64(0.5)])
def test_a_scale_may_be_any_real_number(bench: Any, array: Any, scale: Any) -> None:
    b = bench(64)
    x = array(*GOOD)
    b.executor.forward(x, x, x, scale)
    assert b.driver.launches[0].values["scale_log2"] == pytest.approx(float(scale) / math.log(2))


def test_numpy_arrays_are_sent_to_the_emulator(bench: Any) -> None:
    x = np.zeros(GOOD, np.float16)
    with pytest.raises(ArgumentError, match=r"q is on the CPU.*target='emulator'"):
        bench(64).executor.forward(x, x, x)


def test_a_mixture_of_libraries_is_refused(bench: Any, array: Any) -> None:
    with pytest.raises(ArgumentError, match=r"v is a NumPy array and q is a foreign"):
        bench(64).executor.forward(array(*GOOD), array(*GOOD), np.zeros(GOOD, np.float16))


@pytest.mark.parametrize("thing", [None, 3, [1.0], "q"])
def test_what_is_no_array_is_refused(bench: Any, array: Any, thing: object) -> None:
    for arguments in ((thing, array(*GOOD)), (array(*GOOD), thing)):
        with pytest.raises(ArgumentError, match="is not an array"):
            bench(64).executor.forward(*arguments, array(*GOOD))


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        (
            "out",
            (2, 8, 4, 32),
            {},
            "out has shape (2, 8, 4, 32); with these q and v it must be (2, 8, 4, 64)",
        ),
        ("do", (2, 7, 4, 64), {}, "do has shape (2, 7, 4, 64)"),
        ("do", GOOD, {"strides": (0, 0, 0, 0)}, "do has strides (0, 0, 0, 0); the last one must be 1"),
        ("do", GOOD, {"dtype": "<f4"}, "do is fp32"),
        ("out", GOOD, {"device": 1}, "out is on cuda:1 and q on cuda:0"),
        ("lse", (2, 8, 4), {"dtype": "<f4"}, "lse has shape (2, 8, 4); with this q it must be (2, 4, 8)"),
        ("lse", (2, 4, 8), {}, "lse is fp16; it must be the float32 array"),
        ("lse", (2, 4, 8), {"dtype": "<f4", "device": 1}, "lse is on cuda:1 and q on cuda:0"),
        ("lse", (2, 4, 8), {"dtype": "<f4", "strides": (64, 16, 2)}, "it must be contiguous"),
        ("dlse", (2, 8, 4), {"dtype": "<f4"}, "dlse has shape (2, 8, 4); with this q it must be (2, 4, 8)"),
        ("dlse", (2, 4, 8), {}, "dlse is fp16; it must be float32"),
    ],
)
def test_a_bad_gradient_argument_is_named_with_its_value(
    bench: Any, array: Any, name: str, shape: Any, options: Any, words: str
) -> None:
    b = bench(64)
    made = {n: array(*GOOD) for n in ("do", "q", "k", "v", "out")} | {"lse": array(2, 4, 8, dtype="<f4")}
    made[name] = array(*shape, **options)
    with pytest.raises(ArgumentError) as error:
        b.executor.backward(*(made[n] for n in ("do", "q", "k", "v", "out", "lse")), dlse=made.get("dlse"))
    assert words in str(error.value)
    assert b.driver.launches == []


def test_a_forward_only_kernel_has_no_backward_pass(bench: Any, array: Any) -> None:
    b = bench(64, direction="forward")
    x = array(*GOOD)
    with pytest.raises(ArgumentError, match="direction='both'"):
        b.executor.backward(x, x, x, x, x, array(2, 4, 8, dtype="<f4"))


def test_more_blocks_than_a_grid_holds_are_refused(bench: Any, array: Any) -> None:
    b = bench(64)
    q = array(2**20, 2**12, 2**10, 64, strides=(0, 0, 0, 1))
    kv = array(2**20, 1, 1, 64, strides=(0, 0, 0, 1))
    with pytest.raises(ArgumentError, match="thread blocks"):
        b.executor.forward(q, kv, kv)


def test_what_is_no_array_is_named_beside_arrays_that_say_where_sequences_begin(bench: Any, array: Any) -> None:
    b, x, starts = bench(64, varlen=True), array(8, 4, 64), array(3, dtype="<i4")
    with pytest.raises(ArgumentError, match=r"k: builtins\.NoneType is not an array"):
        b.executor.forward(x, None, x, sequences=Sequences(starts, starts, 8, 8))
    with pytest.raises(ArgumentError, match=r"lse: builtins\.NoneType is not an array"):
        b.executor.backward(x, x, x, x, x, None, sequences=Sequences(starts, starts, 8, 8))
    assert b.driver.launches == []


def test_a_later_call_is_refused_with_the_words_of_a_first_one(bench: Any, array: Any) -> None:
    good = [array(*GOOD) for _ in "qkv"]
    for place, name in enumerate("qkv"):
        for options, words in (
            ({"dtype": ">f2"}, ">f2"),
            ({"dtype": "<i2"}, "<i2"),
            ({"device": 1}, "cuda:1"),
            ({"offset": 1}, "no multiple of its element size"),
            ({"strides": (2048, 256, 1, 4)}, "the last one must be 1"),
        ):
            arrays: list[Any] = list(good)
            arrays[place] = array(*GOOD, **options)
            later = bench(64)
            later.executor.forward(*good)
            launched = len(later.driver.launches)
            for run in (later, bench(64)):
                with pytest.raises(ArgumentError) as error:
                    run.executor.forward(*arrays)
                assert words in str(error.value)
                assert name in str(error.value)
            assert len(later.driver.launches) == launched


def test_a_validity_mask_is_refused_by_the_name_of_its_array(bench: Any, array: Any) -> None:
    x, masked = array(*GOOD), array(*GOOD)
    masked.__cuda_array_interface__["mask"] = x
    with pytest.raises(ArgumentError, match=r"^v has a validity mask"):
        bench(64).executor.forward(x, x, masked)


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_cache_on_a_gpu_that_is_read_only_is_refused(bench: Any, array: Any, place: int, is_remembered: bool) -> None:
    b = bench(64, direction="forward", cache="contiguous")
    caches, new = [array(2, 64, 4, 64), array(2, 64, 4, 64)], array(2, 3, 4, 64)
    cache = KVCache(array(2, dtype="<i4"))
    if is_remembered:
        b.executor.append(*caches, new, new, cache, None, None, None)
    interface = caches[place].__cuda_array_interface__
    interface["data"] = (interface["data"][0], True)
    launched = len(b.driver.launches)
    with pytest.raises(ArgumentError, match=f"{'kv'[place]}_cache is read-only"):
        b.executor.append(*caches, new, new, cache, None, None, None)
    assert len(b.driver.launches) == launched
