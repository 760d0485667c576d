"""Tensor maps of a call: what they say, what a launch writes into them, and what runs without them."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flashgen.errors import LaunchError
from flashgen.launch.call.boxes import address_can_be_written
from flashgen.plan.model.plans import Problem
from flashgen.spec import causal


def word(launch: Any, name: str, index: int) -> int:
    return int(struct.unpack("16Q", launch.values[name])[index])


def words(launch: Any, name: str) -> tuple[int, ...]:
    """Extents, byte strides and box of a map."""
    return struct.unpack("16Q", launch.values[name])[1:12]


def accesses(b: Any) -> list[str]:
    return [launch.name.partition(":")[0].removeprefix("access") for launch in b.driver.launches]


@pytest.fixture
def hopper(bench: Any) -> Any:
    return bench(64, arch="sm_90a", mask=causal())


def test_maps_say_what_the_arguments_and_the_plan_say(hopper: Any, array: Any) -> None:
    q = array(2, 300, 4, 64)
    k = array(2, 90, 2, 64, strides=(90 * 512, 512, 64, 1))
    v = array(2, 90, 2, 64, strides=(64, 256, 128, 1))
    o, _ = hopper.executor.forward(q, k, v)
    (launch,) = hopper.driver.launches
    boxes = {box.tensor: box for box in hopper.driver.plans[launch.name].boxes}
    want = {
        "q": (q.pointer, (64, 300, 4, 2), (512, 128, 300 * 512)),
        "k": (k.pointer, (64, 90, 2, 2), (1024, 128, 90 * 1024)),
        "v": (v.pointer, (64, 90, 2, 2), (512, 256, 128)),
        "o": (o.info.pointer, (64, 300, 4, 2), (512, 128, 300 * 512)),
    }
    for name, (address, dims, strides) in want.items():
        box = boxes[name].columns, boxes[name].rows, 1, 1
        assert word(launch, f"{name}_map", 0) == address
        assert words(launch, f"{name}_map") == (*dims, *strides, *box)
    assert launch.values["o"] == o.info.pointer


def test_remembered_calls_write_their_addresses_anew(hopper: Any, array: Any, monkeypatch: Any) -> None:
    first, second = ([array(1, 70, 2, 64) for _ in "qkv"] for _ in range(2))
    hopper.executor.forward(*first)
    # From now on a call that encodes anything is an error.
    monkeypatch.setattr(hopper.driver, "call", None)
    o, _ = hopper.executor.forward(*second)
    addresses = [word(hopper.driver.launches[1], f"{t}_map", 0) for t in "qkvo"]
    assert addresses == [*(a.pointer for a in second), o.info.pointer]


def test_no_more_blocks_start_than_run_at_once_and_they_get_all_tiles(hopper: Any, array: Any) -> None:
    for batch in (1, 20):
        x = array(batch, 1000, 8, 64)
        hopper.executor.forward(x, x, x)
    few, many = hopper.driver.launches
    per_head = -(-1000 // hopper.driver.plans[few.name].grid_tile)
    assert (few.grid, many.grid) == ((8 * per_head, 1, 1), (132, 1, 1))
    assert [(x.values["q_tiles"], x.values["tiles"]) for x in (few, many)] == [
        (per_head, 8 * per_head),
        (per_head, 160 * per_head),
    ]


@pytest.mark.parametrize(
    ("strides", "access"),
    [
        ((8 * 256, 256, 64, 1), "16"),
        ((0, 256, 64, 1), "16"),
        ((8 * 256, 256, 0, 1), "16"),
        ((-8 * 256, 256, 64, 1), "8"),
        ((8 * 256, -256, 64, 1), "8"),
        ((2**39, 256, 64, 1), "8"),
        ((8 * 260, 260, 64, 1), "8"),
        ((8 * 258, 258, 64, 1), "4"),
    ],
)
def test_tensors_that_the_copy_engine_cannot_take_run_without_it(
    hopper: Any, array: Any, strides: Any, access: str
) -> None:
    x = array(2, 8, 4, 64)
    for arguments in ((array(2, 8, 4, 64, strides=strides), x, x), (x, x, array(2, 8, 4, 64, strides=strides))):
        hopper.executor.forward(*arguments)
    assert accesses(hopper) == [access] * 2
    assert all(hopper.driver.plans[x.name].is_persistent == (access == "16") for x in hopper.driver.launches)


def test_strides_that_no_address_depends_on_do_not_matter(hopper: Any, array: Any) -> None:
    x = array(1, 8, 1, 64, strides=(-3, 64, 2**60 + 1, 1))
    hopper.executor.forward(x, x, x)
    assert accesses(hopper) == ["16"]
    assert words(hopper.driver.launches[0], "q_map")[4:7] == (128, 0, 0)


def test_without_keys_there_is_nothing_to_copy_boxes_of(hopper: Any, array: Any) -> None:
    none = array(1, 0, 2, 64)
    hopper.executor.forward(array(1, 8, 2, 64), none, none)
    assert accesses(hopper) == ["8"]


@pytest.mark.parametrize("shape", [(0, 8, 2, 64), (1, 0, 2, 64)])
def test_where_nothing_is_launched_no_other_kernel_is_made(hopper: Any, array: Any, shape: Any) -> None:
    x = array(*shape)
    hopper.executor.forward(x, x, x)
    assert (hopper.driver.launches, hopper.variants) == ([], [])


def test_more_tiles_than_a_kernel_can_count_are_not_for_it(hopper: Any, array: Any) -> None:
    variants = hopper.executor.variants
    tile = variants.plan(16).kernel("forward").grid_tile
    arrays = [replace(a, pointer=0) for a in _infos(array)]
    at_most = 2**31 // tile * tile
    for heads, access in ((tile - 1, 16), (tile + 1, 8)):
        found, maps = variants.mapped("forward", 16, Problem(1, heads, 1, at_most, 8), 0.125, arrays, 0)
        assert (found, set(maps)) == (access, {"forward"} if access == 16 else set())


def _infos(array: Any) -> Any:
    from flashgen.launch.arrays.frameworks import framework_of

    x = array(1, 8, 2, 64)
    framework = framework_of(x)
    return framework.describe("qkvo", framework.signature((x, x, x, x), None)[0])


def backward(b: Any, array: Any, x: Any, **options: Any) -> list[str]:
    batch, rows, heads, dim = x.__cuda_array_interface__["shape"]
    y, lse = array(batch, rows, heads, dim), array(batch, heads, rows, dtype="<f4")
    b.executor.backward(y, x, x, x, y, lse, **options)
    return accesses(b)


def test_each_kernel_of_a_backward_pass_has_maps_of_its_own(hopper: Any, array: Any) -> None:
    assert set(backward(hopper, array, array(2, 300, 4, 64))) == {"16"}
    (main,) = (x for x in hopper.driver.launches if "backward_main" in x.name)
    boxes = {box.tensor: box for box in hopper.driver.plans[main.name].boxes}
    assert set(boxes) == {"q", "k", "v", "dout", "row_stats", "dq_accum", "dk", "dv", "dq"}
    # Statistics are two rows for each tile of queries of each head: three tiles of 128, of 4 heads of 2 sequences.
    tiles = 3 * 4 * 2
    of_workspaces = {"row_stats": (128, 2 * tiles, 1, 1), "dq_accum": (256, 128 * 64 // 256 * tiles, 1, 1)}
    extents = dict.fromkeys(boxes, (64, 300, 4, 2)) | of_workspaces
    for name, box in boxes.items():
        assert words(main, f"{name}_map")[-4:] == (box.columns, box.rows, 1, 1)
        assert words(main, f"{name}_map")[:4] == extents[name]


def test_backward_passes_do_without_the_copy_engine_where_strides_repeat_backwards(hopper: Any, array: Any) -> None:
    assert set(backward(hopper, array, array(2, 8, 4, 64, strides=(-8 * 256, 256, 64, 1)))) == {"8"}


def test_kernels_that_divide_by_the_scale_are_not_for_a_scale_of_nothing(hopper: Any, array: Any) -> None:
    assert set(backward(hopper, array, array(2, 8, 4, 64), scale=1e-36)) == {"8"}


MISPLACED = {
    "elsewhere": lambda address, words: [words[0], address, *words[1:]],
    "in_parts": lambda address, words: [address & 2**32 - 1, address >> 32, *words],
    "beside_more": lambda address, words: [address | 1 << 63, *words],
    "with_a_sum": lambda address, words: [address, *words[:-1], sum(words) ^ address],
}


@pytest.mark.parametrize("how", MISPLACED)
def test_where_addresses_cannot_be_written_into_maps_kernels_do_without(bench: Any, array: Any, how: str) -> None:
    b = bench(64, arch="sm_90a")
    b.driver.encode = MISPLACED[how]
    x = array(1, 8, 2, 64)
    b.executor.forward(x, x, x)
    assert accesses(b) == ["8"]


def test_a_warmup_loads_what_calls_will_need_without_maps(bench: Any) -> None:
    plain, misplaced = bench(64, arch="sm_90a"), bench(64, arch="sm_90a")
    plain.executor.variants.load(0)
    misplaced.driver.encode = MISPLACED["elsewhere"]
    misplaced.executor.variants.load(0)
    assert (plain.variants, misplaced.variants) == ([], [8])


def test_a_call_whose_maps_the_driver_refuses_runs_without(hopper: Any, array: Any) -> None:
    def fussy(address: int, words: list[int]) -> list[int]:
        if words[1] == 13:
            raise LaunchError("cuTensorMapEncodeTiled failed: no such tensor")
        return [address, *words]

    hopper.driver.encode = fussy
    for length in (13, 14):
        x = array(1, length, 2, 64)
        hopper.executor.forward(x, x, x)
    assert accesses(hopper) == ["8", "16"]


def test_one_map_that_hides_its_address_is_enough_to_do_without(hopper: Any, array: Any) -> None:
    hopper.driver.encode = lambda address, words: [address + (words[1] == 13), *words]
    x = array(1, 13, 2, 64)
    hopper.executor.forward(x, x, x)
    assert accesses(hopper) == ["8"]


def test_samples_that_an_encoder_refuses_say_nothing() -> None:
    def only_plain(sample: Any) -> bytes:
        if 0 in sample.strides or sample.fill == "nan":
            raise LaunchError("refused")
        return struct.pack("QQ", 5, sample.address)

    def nothing(sample: Any) -> bytes:
        raise LaunchError("refused")

    assert address_can_be_written(only_plain, 8)
    assert not address_can_be_written(only_plain, 0)
    assert not address_can_be_written(nothing, 8)


def test_the_driver_is_put_to_the_test_once(hopper: Any, array: Any, monkeypatch: Any) -> None:
    encoded: list[int] = []
    hopper.driver.encode = lambda address, words: (encoded.append(address), [address, *words])[1]
    counts = []
    for length in (8, 9, 10):
        x = array(1, length, 2, 64)
        hopper.executor.forward(x, x, x)
        counts.append(len(encoded))
    assert counts[0] > 4
    assert [b - a for a, b in pairwise(counts)] == [4, 4]
