"""The tiles of the decode kernel, which calls use it, and the workspace of its parts."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.arch import ARCHS, get_arch
from flashgen.errors import ArgumentError, PlanError
from flashgen.plan import plan
from flashgen.plan.decode.parts import check_units, min_units, part_tiles, partial_count, partial_rows, prefers_decode
from flashgen.plan.decode.tiles import tiles_of
from flashgen.plan.model.plans import KernelPlan, Problem
from flashgen.spec import AttentionSpec, Schedule, causal

DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


def spec(dim: int = 128, dim_v: int = 0, **fields: Any) -> AttentionSpec:
    given: dict[str, Any] = {"mask": causal(), "direction": "forward", "cache": "paged", **fields}
    return AttentionSpec(dim, head_dim_v=dim_v or dim, **given)


def decode(dim: int = 128, arch: str = "sm_90a", **fields: Any) -> KernelPlan:
    return plan(spec(dim, **fields), None, arch).kernel("decode")


@pytest.mark.parametrize("arch", [name for name in ARCHS if name not in ("sm_75", "sm_90a")])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_enough_bytes_are_under_way_and_the_blocks_fit(dim: int, dim_v: int, arch: str) -> None:
    made, row = plan(spec(dim, dim_v), None, arch).kernel("decode"), get_arch(arch)
    tiles = tiles_of(made.spec, row)
    assert tiles is not None
    each = made.smem.bytes + row.reserved_smem_per_block
    assert made.smem.bytes <= row.max_smem_per_block
    assert tiles.blocks * each <= row.smem_per_multiprocessor
    stage = tiles.keys * 2 * (dim + dim_v)
    has_much = row.smem_per_multiprocessor > 128 * 1024
    under_way = (tiles.stages - 1) * stage
    assert under_way >= 24 * 1024
    assert tiles.blocks * under_way >= (64 if has_much else 32) * 1024
    # A hundred kilobytes hold two blocks up to 128 columns.
    assert tiles.blocks >= 2 or (dim > 128 and not has_much)


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_hoppers_ring_has_at_least_three_tiles_of_keys_and_values(dim: int, dim_v: int, cache: str) -> None:
    made = decode(dim, dim_v=dim_v, cache=cache)
    assert [box.tensor for box in made.boxes] == ["k", "v"]
    assert {box.within_pages for box in made.boxes} == {cache == "paged"}
    assert int(made.constant("stages")) >= 3
    assert made.smem["k"].bytes + made.smem["v"].bytes >= 96 * 1024
    assert made.smem.bytes <= get_arch("sm_90a").max_smem_per_block


@pytest.mark.parametrize("fields", [{"dtype": "fp32"}, {"cache_dtype": "e4m3"}])
def test_hoppers_kernel_is_for_16_bit_caches(fields: Any) -> None:
    made = plan(spec(**fields), None, "sm_90a")
    assert not made.has("decode") or not made.kernel("decode").boxes


@pytest.mark.parametrize(
    ("fields", "schedule", "arch", "access_bytes"),
    [
        ({"dtype": "fp32"}, None, "sm_80", None),
        ({"dtype": "fp16"}, None, "sm_75", None),
        ({"cache": None}, None, "sm_80", None),
        ({}, Schedule(tile_kv=32), "sm_80", None),
        ({}, None, "sm_80", 2),
    ],
)
def test_other_specs_have_no_decode_kernel(fields: Any, schedule: Any, arch: str, access_bytes: int | None) -> None:
    made = plan(spec(**fields), schedule, arch, access_bytes=access_bytes)
    assert not made.has("decode")


@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "sm_75"])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("fields", [{}, {"page_scales": True}, {"dtype": "e4m3"}], ids=str)
def test_an_8_bit_cache_has_one_kernel_with_as_many_bytes_under_way(
    dim: int, dim_v: int, arch: str, fields: Any
) -> None:
    made = plan(spec(dim, dim_v, cache_dtype="e4m3", **fields), None, arch)
    attending = [kernel.role for kernel in made.kernels if kernel.role not in ("append", "clear_gaps")]
    # Hopper multiplies 8-bit operands, where rows are whole chunks.
    multiplies = "dtype" in fields and arch == "sm_90a" and dim % 16 == dim_v % 16 == 0
    assert attending == ["decode", *(["prefill"] if multiplies else [])]
    assert made.forward is made.kernel("decode")
    row, tiles, smem = get_arch(arch), tiles_of(made.spec, get_arch(arch)), made.forward.smem
    assert tiles is not None
    assert tiles.blocks * (smem.bytes + row.reserved_smem_per_block) <= row.smem_per_multiprocessor
    columns = sum(-(-d // 32) * 32 for d in (dim, dim_v))
    under_way = (tiles.stages - 1) * tiles.keys * columns
    assert under_way >= 24 * 1024 or tiles.stages == 5
    # So a ring of the same size holds the same bytes, which are twice the keys.
    assert smem["k"].bytes + smem["v"].bytes == tiles.stages * tiles.keys * columns


@pytest.mark.parametrize(
    ("dim", "arch", "keys"),
    [(32, "sm_90a", 32), (64, "sm_80", 32), (128, "sm_80", 16), (128, "sm_90a", 32), (256, "sm_90a", 16)],
)
def test_slices_of_narrow_heads_have_more_keys(dim: int, arch: str, keys: int) -> None:
    made = decode(dim, arch, cache_dtype="e4m3")
    assert int(made.constant("tile_kv")) == keys * int(made.constant("warps"))


def test_a_slice_has_fewer_keys_where_shared_memory_is_short() -> None:
    tiles = tiles_of(spec(64, cache_dtype="e4m3"), get_arch("sm_86"))
    assert tiles is not None
    assert (tiles.slice_keys, tiles.warps) == (16, 4)


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        ({}, {"arch": "sm_75"}, "needs asynchronous copies of sm_80 or later, and arch='sm_75' has none"),
        ({}, {"schedule": Schedule(tile_kv=32)}, "has one schedule; leave the schedule out"),
        ({}, {"access_bytes": 2}, "needs rows aligned to 4 bytes, and access_bytes=2; pass contiguous q, k and v"),
    ],
)
def test_an_8_bit_cache_that_no_kernel_reads_is_refused(fields: Any, arguments: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(spec(cache_dtype="e5m2", dtype="fp16", **fields), **{"arch": "sm_80", **arguments})


def test_too_many_tiles_for_the_only_kernel_are_refused_by_name() -> None:
    kernel = decode(cache_dtype="e4m3")
    check_units(kernel, Problem(100, 32, 8, 1, 2**20))
    with pytest.raises(
        ArgumentError, match=r"q has batch 100 and length 1, and a sequence has room for .* split the batch"
    ):
        check_units(kernel, Problem(100, 32, 8, 1, 2**30 - 1))


def test_few_queries_prefer_the_decode_kernel() -> None:
    kernel = decode()

    def prefers(len_q: int, len_kv: int = 1000, batch: int = 4, *, batch_invariant: bool = False) -> bool:
        return prefers_decode(kernel, Problem(batch, 32, 8, len_q, len_kv), batch_invariant=batch_invariant)

    assert [prefers(n) for n in (1, 63, 64)] == [True, True, False]
    assert prefers(1000, batch_invariant=True)
    # Units are counted in 32 bits, and without room for keys the grid has no blocks.
    assert not prefers(1, 2**30 - 1, batch=100)
    assert not prefers(1, 0)


def test_parts_of_fixed_sizes_do_not_depend_on_the_room_in_the_cache() -> None:
    kernel = decode()
    sizes = {part_tiles(kernel, Problem(4, 32, 8, 1, n), 0, batch_invariant=True) for n in (100, 10**6)}
    assert sizes == {4096 // kernel.grid_tile}
    assert part_tiles(kernel, Problem(4, 32, 8, 1, 10000), 0, batch_invariant=False) == 0
    # 157 tiles in four parts.
    assert part_tiles(kernel, Problem(4, 32, 8, 1, 10000), 4, batch_invariant=False) == 40


def test_each_part_has_a_slot() -> None:
    kernel, problem = decode(), Problem(5, 32, 8, 3, 10000)
    assert partial_rows(kernel, problem) == 12
    assert partial_count(kernel, problem, 0, blocks=264) == 528
    assert partial_count(kernel, problem, 40, blocks=264) == 5 * 8 * 4
    # 80 rows of a head are two tiles.
    many = Problem(5, 32, 8, 20, 10000)
    assert partial_rows(kernel, many) == 64
    assert partial_count(kernel, many, 40, blocks=264) == 2 * 5 * 8 * 4


def parts_of(kernel: KernelPlan, tiles: int, rows: int) -> int:
    return max(1, round(tiles / min_units(kernel, tiles, rows)))


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cache_dtype": "e4m3"},
        {"dim": 64, "dim_v": 512, "qv": True},
        {"dim": 64, "dim_v": 512, "qv": True, "arch": "sm_80"},
    ],
    ids=str,
)
def test_an_item_is_cut_into_the_parts_that_take_least_time(fields: dict[str, Any], rows: int) -> None:
    kernel = decode(**fields)
    merged, fixed = (int(kernel.constant(name)) for name in ("merged_parts", "item_tiles"))

    def time(tiles: int, parts: int) -> float:
        # In tiles: those of a block, and the merge of all parts.
        return tiles / parts + (parts * -(-rows // 8) / merged + fixed if parts > 1 else 0)

    for tiles in (1, 2, 3, 5, 8, 13, 21, 50, 128, 300, 1000, 5000):
        best = min(time(tiles, parts) for parts in range(1, tiles + 1))
        assert time(tiles, parts_of(kernel, tiles, rows)) <= 1.25 * best, tiles


@pytest.mark.parametrize(
    ("fields", "keys", "rows", "parts"),
    [
        # Where a part is small compared with a tile, more blocks than a GPU has may share a long sequence.
        ({}, 8192, 4, 32),
        ({}, 131072, 4, 158),
        # A short one stays whole.
        ({}, 256, 4, 1),
        # A part of 64 rows and 512 columns takes as long as a tile.
        ({"dim": 64, "dim_v": 512, "qv": True}, 32768, 64, 22),
        # The portable kernel takes longer for a tile.
        ({"dim": 64, "dim_v": 512, "qv": True, "arch": "sm_80"}, 32768, 64, 35),
    ],
)
def test_parts_of_one_sequence(fields: dict[str, Any], keys: int, rows: int, parts: int) -> None:
    kernel = decode(**fields)
    assert parts_of(kernel, keys // kernel.grid_tile, rows) == parts
