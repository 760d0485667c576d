"""What a forward call hands to the driver."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flashgen.spec import causal, window


def test_every_field_of_the_parameter_struct_is_what_the_arguments_say(bench: Any, array: Any) -> None:
    b = bench(64, mask=causal())
    q = array(2, 70, 4, 64, strides=(70 * 256, 256, 64, 1))
    k = array(2, 90, 2, 64, strides=(90 * 512, 512, 64, 1))
    v = array(2, 90, 2, 64, strides=(64, 256, 128, 1))
    o, lse = b.executor.forward(q, k, v, 0.25)
    (launch,) = b.driver.launches
    want = {
        **{"q": q.pointer, "k": k.pointer, "v": v.pointer, "o": o.info.pointer, "lse": lse.info.pointer},
        **{"q_batch": 70 * 256, "q_row": 256, "q_head": 64},
        **{"k_batch": 90 * 512, "k_row": 512, "k_head": 64},
        **{"v_batch": 64, "v_row": 256, "v_head": 128},
        **{"o_batch": 70 * 256, "o_row": 256, "o_head": 64},
        **{"batch": 2, "heads_q": 4, "heads_kv": 2, "len_q": 70, "len_kv": 90, "group": 2},
        **{"band_lower": -70, "band_upper": 20, "scale": 0.25, "scale_log2": 0.25 * math.log2(math.e)},
    }
    assert launch.values == {name: pytest.approx(want[name], rel=1e-6) for name in launch.values}


def test_the_grid_and_shared_memory_are_the_plans(bench: Any, array: Any) -> None:
    b = bench(64)
    b.executor.forward(array(3, 1000, 8, 64), array(3, 50, 8, 64), array(3, 50, 8, 64))
    (launch,) = b.driver.launches
    plan = b.driver.plans[launch.name]
    assert launch.grid == (-(-1000 // plan.grid_tile), 8, 3)
    assert (launch.threads, launch.smem_bytes) == (plan.threads, plan.smem.bytes)


def test_outputs_have_the_shapes_and_types_of_the_contract(bench: Any, array: Any) -> None:
    b = bench(64, head_dim_v=32)
    o, lse = b.executor.forward(array(2, 5, 6, 64), array(2, 7, 3, 64), array(2, 7, 3, 32))
    assert (o.shape, o.dtype) == ((2, 5, 6, 32), "fp16")
    assert (lse.shape, lse.dtype) == ((2, 6, 5), "fp32")


def test_the_default_scale_is_one_over_the_root_of_the_head_dim(bench: Any, array: Any) -> None:
    b = bench(64)
    b.executor.forward(array(1, 1, 1, 64), array(1, 1, 1, 64), array(1, 1, 1, 64))
    assert b.driver.launches[0].values["scale_log2"] == pytest.approx(0.125 * math.log2(math.e))


def test_remembered_calls_take_their_addresses_anew(bench: Any, array: Any) -> None:
    b = bench(64)
    pairs = [(array(1, 16, 1, 64), array(1, 16, 1, 64)) for _ in range(3)]
    for q, kv in pairs:
        b.executor.forward(q, kv, kv)
    seen = [(x.values["q"], x.values["k"]) for x in b.driver.launches]
    assert seen == [(q.pointer, kv.pointer) for q, kv in pairs]


def test_another_scale_is_another_call(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 16, 1, 64)
    for scale in (0.5, 0.25, 0.5):
        b.executor.forward(x, x, x, scale)
    factors = [launch.values["scale_log2"] / math.log2(math.e) for launch in b.driver.launches]
    assert factors == pytest.approx([0.5, 0.25, 0.5], rel=1e-6)


def test_strides_beyond_32_bits_arrive_whole(bench: Any, array: Any) -> None:
    b = bench(64)
    far = 2**33 + 64
    q = array(2, 4, 2, 64, strides=(far, 128, 64, 1))
    kv = array(2, 4, 2, 64)
    b.executor.forward(q, kv, kv)
    assert b.driver.launches[0].values["q_batch"] == far


def test_expanded_inputs_keep_their_stride_of_zero(bench: Any, array: Any) -> None:
    b = bench(64)
    q, kv = array(2, 8, 4, 64), array(2, 8, 4, 64, strides=(0, 64, 0, 1))
    b.executor.forward(q, kv, kv)
    values = b.driver.launches[0].values
    assert (values["k_batch"], values["k_row"], values["k_head"]) == (0, 64, 0)


def test_strides_of_single_element_dimensions_do_not_matter(bench: Any, array: Any) -> None:
    b = bench(64)
    odd = array(1, 1, 1, 64, strides=(7, 3, 1, 1))
    b.executor.forward(odd, odd, odd)
    assert b.variants == []
    assert b.driver.launches[0].values["q_row"] == 0


def test_a_head_dim_of_one_may_have_any_last_stride(bench: Any, array: Any) -> None:
    b = bench(1)
    x = array(1, 4, 1, 1, strides=(8, 2, 1, 64))
    b.executor.forward(x, x, x)
    assert len(b.driver.launches) == 1


@pytest.mark.parametrize(("batch", "len_q", "heads"), [(0, 5, 2), (2, 0, 2), (2, 5, 0)])
def test_nothing_is_launched_when_there_is_nothing_to_write(
    bench: Any, array: Any, batch: int, len_q: int, heads: int
) -> None:
    b = bench(64)
    kv = array(batch, 9, heads, 64)
    o, lse = b.executor.forward(array(batch, len_q, heads, 64), kv, kv)
    assert (o.shape, lse.shape) == ((batch, len_q, heads, 64), (batch, heads, len_q))
    assert b.driver.launches == []


def test_without_keys_the_kernel_still_writes_the_empty_result(bench: Any, array: Any) -> None:
    b = bench(64)
    kv = array(1, 0, 2, 64)
    b.executor.forward(array(1, 5, 2, 64), kv, kv)
    assert b.driver.launches[0].values["len_kv"] == 0


def test_the_band_follows_the_lengths(bench: Any, array: Any) -> None:
    b = bench(64, mask=window(3, 1, align="top-left"))
    for len_kv in (8, 4):
        kv = array(1, len_kv, 1, 64)
        b.executor.forward(array(1, 8, 1, 64), kv, kv)
    bands = [(x.values["band_lower"], x.values["band_upper"]) for x in b.driver.launches]
    assert bands == [(-3, 1), (-3, 1)]
