"""TMA: boxes of tensors in and out of shared memory, against a few lines of NumPy that say what must happen."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

from flashgen.emulator import LaunchTraffic
from flashgen.launch.driver.tensor_map import ELEMENTS, TensorMap

SCHEDULES = ["sequential", "reverse", "random", "priority"]
#: A barrier of one arrival at offset 0, and boxes from offset 1024 on.
SETUP = """const int t = thread_idx();
const u32 bar = shared_address(shared), tile = bar + 1024;
if (t == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
block_sync();
"""
LOAD = """if (t == 0) {{
  mbarrier_arrive_expect_tx(bar, {bytes});
  tma_load_{rank}d(tile, map, bar, {at});
}}
mbarrier_wait(bar, 0);
for (int i = t; i < {bytes}; i += 32) out[i] = shared[1024 + i];
"""
STORE = """for (int i = t; i < {bytes}; i += 32) shared[1024 + i] = x[i];
fence_proxy_async();
block_sync();
if (t == 0) {{
  tma_{verb}_{rank}d(map, tile, {at});
  bulk_commit();
  bulk_wait<0>();
}}
"""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same at an address that is a multiple of 16."""
    storage = np.zeros(array.nbytes + 16, np.uint8)
    first = -storage.ctypes.data % 16
    copy = storage[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensor_map(array: np.ndarray[Any, Any], element: str, box: tuple[int, ...], **options: Any) -> TensorMap:
    """Of a C-contiguous array, whose last axis is dimension 0."""
    strides = tuple(reversed(array.strides))[1:]
    return TensorMap(array.ctypes.data, element, tuple(reversed(array.shape)), strides, box, **options)


def swizzled(data: np.ndarray[Any, Any], span: int) -> np.ndarray[Any, Any]:
    """Bytes of a box, from offset 0 of a 1024-byte line on, as they lie in shared memory."""
    if span == 0:
        return data
    place = np.arange(data.size)
    moved = np.zeros_like(data)
    moved[place ^ (place >> 7 & span // 16 - 1) << 4] = data
    return moved


def box_shape(m: TensorMap) -> tuple[int, ...]:
    """Elements along each dimension of what is copied."""
    return tuple(-(-b // s) for b, s in zip(m.box, m.element_strides, strict=True))


def box_of(array: np.ndarray[Any, Any], m: TensorMap, at: tuple[int, ...], outside: int = 0) -> np.ndarray[Any, Any]:
    """The elements of a box, in order, as an array with the last axis first along."""
    found = np.full(tuple(reversed(box_shape(m))), outside, array.dtype)
    for index in product(*(range(n) for n in found.shape)):
        place = tuple(c + i * s for c, i, s in zip(reversed(at), index, reversed(m.element_strides), strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            found[index] = array[place]
    return found


def box_bytes(m: TensorMap) -> int:
    """What a load counts at its mbarrier, also beyond the tensor's ends."""
    return prod(box_shape(m)) * ELEMENTS[m.element].bytes


def load(run: Any, array: np.ndarray[Any, Any], m: TensorMap, at: tuple[int, ...], **options: Any) -> Any:
    out = np.zeros(box_bytes(m), np.uint8)
    body = SETUP + LOAD.format(bytes=box_bytes(m), rank=m.rank, at=", ".join(map(str, at)))
    run(body, smem=1024 + box_bytes(m), maps={"map": m}, tensor=array, out=out, **options)
    return out


SHAPES = {
    2: ((9, 48), (16, 4), (8, 3)),
    3: ((3, 9, 24), (8, 5, 2), (0, 2, 1)),
    4: ((2, 3, 7, 16), (16, 4, 2, 1), (0, 1, 0, 1)),
    5: ((2, 2, 3, 5, 16), (8, 2, 3, 1, 2), (8, 3, 0, 1, 0)),
}


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("race", [False, True])
def test_boxes_of_every_rank_are_loaded(run: Any, rank: int, race: bool) -> None:
    shape, box, at = SHAPES[rank]
    array = aligned(np.random.default_rng(rank).integers(1, 2**16, shape, np.uint16))
    m = tensor_map(array, "u16", box)
    out = load(run, array, m, at, race=race)
    np.testing.assert_array_equal(out.view(np.uint16), box_of(array, m, at).ravel())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", [(-8, -3), (40, 7), (0, 9), (48, 0), (-16, 0), (40, -1)])
def test_what_lies_outside_is_zero(run: Any, schedule: str, at: tuple[int, int]) -> None:
    array = aligned(np.random.default_rng(0).integers(1, 2**16, (9, 48), np.uint16))
    m = tensor_map(array, "u16", (16, 4))
    out = load(run, array, m, at, schedule=schedule, seed=1)
    np.testing.assert_array_equal(out.view(np.uint16), box_of(array, m, at).ravel())


def test_only_bytes_of_the_tensor_count_as_traffic(run: Any) -> None:
    array = aligned(np.ones((9, 48), np.uint16))
    traffic: list[LaunchTraffic] = []
    load(run, array, tensor_map(array, "u16", (16, 4)), (40, 7), traffic=traffic)
    assert traffic[0].read == {"tensor": 8 * 2 * 2}


@pytest.mark.parametrize(("element", "dtype"), [("fp16", np.float16), ("fp32", np.float32)])
def test_what_lies_outside_may_be_nan(run: Any, element: str, dtype: Any) -> None:
    array = aligned(np.ones((4, 16), dtype))
    m = tensor_map(array, element, (16, 4), fill="nan")
    out = load(run, array, m, (8, 2)).view(dtype).reshape(4, 16)
    expected = np.full((4, 16), np.nan)
    expected[:2, :8] = 1
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("swizzle", "columns"), [(0, 64), (32, 16), (64, 32), (64, 16), (128, 64), (128, 32)])
@pytest.mark.parametrize("race", [False, True])
def test_swizzles_move_chunks_of_16_bytes(run: Any, swizzle: int, columns: int, race: bool) -> None:
    array = aligned(np.random.default_rng(swizzle).integers(1, 2**16, (32, 64), np.uint16))
    m = tensor_map(array, "u16", (columns, 16), swizzle=swizzle)
    out = load(run, array, m, (0, 5), race=race)
    np.testing.assert_array_equal(out, swizzled(box_of(array, m, (0, 5)).ravel().view(np.uint8), swizzle))


def test_the_swizzle_depends_on_the_address_not_on_the_box(run: Any) -> None:
    # A box that begins at the fourth line of 128 bytes goes on with the pattern there.
    array = aligned(np.arange(8 * 64, dtype=np.uint16).reshape(8, 64))
    m = tensor_map(array, "u16", (64, 8), swizzle=128)
    out = np.zeros(1024, np.uint8)
    body = SETUP + LOAD.format(bytes=1024, rank=2, at="0, 0").replace("(tile,", "(tile + 384,").replace(
        "1024 + i", "1408 + i"
    )
    run(body, smem=4096, maps={"map": m}, tensor=array, out=out)
    whole = np.zeros(2048, np.uint8)
    whole[384:1408] = array.ravel().view(np.uint8)
    np.testing.assert_array_equal(out, swizzled(whole, 128)[384:1408])


def test_element_strides_skip_elements(run: Any) -> None:
    array = aligned(np.random.default_rng(3).integers(1, 2**16, (3, 20, 16), np.uint16))
    m = tensor_map(array, "u16", (8, 9, 3), element_strides=(1, 4, 2))
    assert box_shape(m) == (8, 3, 2)
    out = load(run, array, m, (8, 2, 1))
    np.testing.assert_array_equal(out.view(np.uint16), box_of(array, m, (8, 2, 1)).ravel())


def test_a_load_counts_the_bytes_of_the_whole_box(run: Any) -> None:
    array = aligned(np.ones((2, 16), np.uint16))
    m = tensor_map(array, "u16", (16, 8))
    assert box_bytes(m) == 256
    assert load(run, array, m, (0, 0)).view(np.uint16).sum() == 32


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", "random"])
def test_boxes_of_every_rank_are_stored_and_clipped(run: Any, rank: int, race: bool, schedule: str) -> None:
    shape, box, at = SHAPES[rank]
    array = aligned(np.zeros(shape, np.uint16))
    m = tensor_map(array, "u16", box)
    beyond = tuple(c + b // 2 + 1 for c, b in zip(at, box, strict=True))
    for place in (at, (beyond[0] // 8 * 8, *beyond[1:]), tuple(n // 8 * 8 for n in reversed(shape))):
        array[...] = 0
        data = np.random.default_rng(rank).integers(1, 2**16, tuple(reversed(box_shape(m))), np.uint16)
        body = SETUP + STORE.format(verb="store", bytes=box_bytes(m), rank=rank, at=", ".join(map(str, place)))
        run(
            body,
            smem=1024 + box_bytes(m),
            maps={"map": m},
            race=race,
            schedule=schedule,
            tensor=array,
            x=data.ravel().view(np.uint8),
        )
        expected = np.zeros(shape, np.uint16)
        for index in product(*(range(n) for n in data.shape)):
            target = tuple(c + i for c, i in zip(reversed(place), index, strict=True))
            if all(0 <= p < n for p, n in zip(target, shape, strict=True)):
                expected[target] = data[index]
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("swizzle", "columns"), [(32, 16), (64, 32), (128, 64)])
def test_stores_undo_the_swizzle(run: Any, swizzle: int, columns: int) -> None:
    array = aligned(np.zeros((16, columns), np.uint16))
    m = tensor_map(array, "u16", (columns, 16), swizzle=swizzle)
    data = np.random.default_rng(0).integers(1, 2**16, (16, columns), np.uint16)
    body = SETUP + STORE.format(verb="store", bytes=box_bytes(m), rank=2, at="0, 0")
    x = swizzled(data.ravel().view(np.uint8), swizzle)
    for race in (False, True):
        array[...] = 0
        run(body, smem=1024 + box_bytes(m), maps={"map": m}, race=race, tensor=array, x=x)
        np.testing.assert_array_equal(array, data)


@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16", "u32"])
@pytest.mark.parametrize("race", [False, True])
def test_reductions_of_all_blocks_add_up(run: Any, element: str, race: bool) -> None:
    import ml_dtypes

    dtype = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "u32": np.uint32}[element]
    array = aligned(np.full((4, 16), 100, UNSIGNED[ELEMENTS[element].bytes]))
    array.view(dtype)[...] = 2
    m = tensor_map(array, element, (16, 8))
    data = np.arange(1, 129).reshape(8, 16).astype(dtype)
    body = SETUP + STORE.format(verb="reduce_add", bytes=box_bytes(m), rank=2, at="0, 1")
    x = data.view(np.uint8).ravel()
    run(body, blocks=3, smem=1024 + box_bytes(m), maps={"map": m}, race=race, tensor=array, x=x)
    expected = np.full((4, 16), 2, dtype)
    for _ in range(3):
        expected[1:] = (expected[1:].astype(np.float64) + data[:3].astype(np.float64)).astype(dtype)
    np.testing.assert_array_equal(array.view(dtype).astype(np.float64), expected.astype(np.float64))


def test_sums_of_16_bit_floats_are_rounded_to_nearest_even_once(run: Any) -> None:
    import ml_dtypes

    for element, dtype in (("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        bits = np.random.default_rng(1).integers(0, 2**16, (2, 64, 256), np.uint16)
        array = aligned(bits[0])
        m = tensor_map(array, element, (256, 64))
        body = SETUP + STORE.format(verb="reduce_add", bytes=box_bytes(m), rank=2, at="0, 0")
        run(body, smem=1024 + box_bytes(m), maps={"map": m}, tensor=array, x=bits[1].view(np.uint8).ravel())
        with np.errstate(all="ignore"):
            a, b = bits[0].view(dtype).astype(np.float64), bits[1].view(dtype).astype(np.float64)
            expected = (a + b).astype(np.float32).astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(array.view(dtype).astype(np.float64), expected)


def test_a_store_writes_whole_chunks_of_16_bytes_beyond_the_end_of_its_rows(run: Any) -> None:
    array = aligned(np.zeros((4, 16), np.uint16))
    m = tensor_map(array[:, :12], "u16", (16, 4))
    body = SETUP + STORE.format(verb="store", bytes=box_bytes(m), rank=2, at="0, 0")
    run(body, smem=1024 + box_bytes(m), maps={"map": m}, tensor=array, x=np.ones(box_bytes(m), np.uint8))
    assert (array == 0x0101).all()
    m = tensor_map(array[:, :8], "u16", (16, 4))
    run(body, smem=1024 + box_bytes(m), maps={"map": m}, tensor=array, x=np.zeros(box_bytes(m), np.uint8))
    assert (array[:, :8] == 0).all()
    assert (array[:, 8:] == 0x0101).all()


# ---- Late and poisoned


def test_the_destination_is_nan_until_the_wait(run: Any) -> None:
    array = aligned(np.ones((4, 16), np.float32))
    out = np.zeros(2, np.float32)
    body = (
        SETUP
        + """auto* f = reinterpret_cast<float*>(shared + 1024);
    if (t == 0) {
      f[5] = 3.0f;
      mbarrier_arrive_expect_tx(bar, 256);
      tma_load_2d(tile, map, bar, 0, 0);
      out[0] = f[5];
      mbarrier_wait(bar, 0);
      out[1] = f[5];
    }"""
    )
    run(body, smem=1280, maps={"map": tensor_map(array, "fp32", (16, 4))}, tensor=array, out=out)
    np.testing.assert_array_equal(out, [np.nan, 1])


def test_a_load_reads_global_memory_late_and_the_map_at_issue(run: Any) -> None:
    array = aligned(np.ones((4, 16), np.float32))
    out = np.zeros(1, np.float32)
    body = (
        SETUP
        + """if (t == 0) {
      TensorMap copy = *map;
      mbarrier_arrive_expect_tx(bar, 256);
      tma_load_2d(tile, &copy, bar, 0, 0);
      copy = {};
      for (int i = 0; i < 64; ++i) tensor[i] = 4.0f;
      mbarrier_wait(bar, 0);
      out[0] = reinterpret_cast<float*>(shared + 1024)[0];
    }"""
    )
    run(body, smem=1280, maps={"map": tensor_map(array, "fp32", (16, 4))}, tensor=array, out=out)
    assert out[0] == 4


def test_under_random_schedules_loads_may_arrive_in_any_order_at_any_time(run: Any) -> None:
    array = aligned(np.ones((2, 16), np.float32))
    body = (
        SETUP
        + """auto* f = reinterpret_cast<float*>(shared + 1024);
    if (t == 0) {
      mbarrier_arrive_expect_tx(bar, 128);
      tma_load_2d(tile, map, bar, 0, 0);
      tma_load_2d(tile + 128, map, bar, 0, 1);
    }
    for (int i = 0; i < 2; ++i) warp_sync();
    if (t == 0) { out[0] = f[0] == 1.0f; out[1] = f[32] == 1.0f; }
    mbarrier_wait(bar, 0);"""
    )
    seen = set()
    for seed in range(40):
        out = np.zeros(2, np.uint32)
        m = tensor_map(array, "fp32", (16, 1))
        run(body, smem=1280, maps={"map": m}, schedule="random", seed=seed, tensor=array, out=out)
        seen.add(tuple(out))
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_store_reads_shared_memory_only_at_the_wait(run: Any) -> None:
    body = """auto* f = reinterpret_cast<float*>(shared + 1024);
    f[t] = 1.0f;
    fence_proxy_async();
    block_sync();
    if (t == 0) {{
      tma_store_2d(map, tile, 0, 0);
      bulk_commit();
      {before}
      f[3] = 2.0f;
      {after}
    }}"""
    for before, after, expected in (("", "bulk_wait_read<0>();", 2), ("bulk_wait_read<0>();", "", 1)):
        array = aligned(np.zeros((2, 16), np.float32))
        m = tensor_map(array, "fp32", (16, 2))
        run(SETUP + body.format(before=before, after=after), smem=1280, maps={"map": m}, tensor=array)
        assert array[0, 3] == expected
