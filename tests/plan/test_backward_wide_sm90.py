"""Planning the backward kernels for Hopper of wide heads: both fit, and no sum leaves the registers."""

from __future__ import annotations

from itertools import product

import pytest

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.launch.call.prepared import tile_counts
from flashgen.plan import plan, workspaces
from flashgen.plan.hopper.backward_tiles import WIDE_DIMS
from flashgen.plan.hopper.units import registers_at_launch
from flashgen.plan.model.plans import KernelPlan, Problem
from flashgen.render.summary import header
from tests.plan.test_backward_sm90 import MASKS, SWIZZLE

ARCH = get_arch("sm_90a")
ROLES = ("main", "query")
#: Columns of a panel, and the bytes of its rows.
PANEL, PANEL_BYTES = 64, 128


def backward(dims: tuple[int, int] = (256, 256), role: str = "main", **spec: object) -> KernelPlan:
    return plan(fg.AttentionSpec(dims[0], head_dim_v=dims[1], **spec), None, ARCH).kernel(role)  # type: ignore[arg-type]


def value(kernel: KernelPlan, name: str) -> int:
    return int(kernel.constant(name))


@pytest.mark.parametrize("dims", WIDE_DIMS)
def test_every_row_of_the_table_fits(dims: tuple[int, int]) -> None:
    for dtype, mask, score in product(("bf16", "fp16"), MASKS.values(), (None, fg.softcap(30.0))):
        for role in ROLES:
            kernel = backward(dims, role, dtype=dtype, mask=mask, score=score)
            assert kernel.algorithm == "FlashAttention-3"
            assert kernel.smem.bytes <= ARCH.max_smem_per_block
            assert kernel.threads == 128 * (1 + value(kernel, "consumers"))
            assert kernel.grid_tile == value(kernel, "tile_kv" if role == "main" else "tile_q")
            assert kernel.reasons
            assert all(kernel.reasons)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dims", WIDE_DIMS)
def test_roles_share_the_registers_that_a_block_begins_with(dims: tuple[int, int], role: str) -> None:
    kernel = backward(dims, role)
    producer, consumer = value(kernel, "producer_registers"), value(kernel, "consumer_registers")
    at_launch = registers_at_launch(3)
    assert producer + 2 * consumer <= 3 * at_launch
    assert 24 <= producer <= at_launch <= consumer <= 240
    assert producer % 8 == consumer % 8 == 0
    if role == "main":
        # dV or dK, S or dP of the next step, and what is rounded of this one.
        tile = value(kernel, "tile_q")
        needed = max(dims) // 2 + tile // 2 + tile // 4
    else:
        # dQ, S and dP, and dS rounded.
        tile = value(kernel, "tile_kv")
        needed = dims[0] // 2 + 2 * tile // 2 + tile // 4
    assert needed + 20 < consumer


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dims", WIDE_DIMS)
def test_shared_memory_is_divided_without_overlap_and_tiles_lie_where_their_pattern_begins(
    dims: tuple[int, int], role: str, mask: str
) -> None:
    kernel = backward(dims, role, mask=MASKS[mask])
    end = 0
    for region in kernel.smem.regions:
        assert region.offset >= end, region
        assert region.offset % (SWIZZLE if region.name in ("k", "v", "q", "do") else 16) == 0, region
        end = region.offset + region.bytes
    rows = {"q": value(kernel, "tile_q"), "k": value(kernel, "tile_kv")}
    slots = dict.fromkeys(("q", "do", "k", "v"), 1)
    slots |= {name: value(kernel, f"{name}_stages") for name in (("q", "do") if role == "main" else ("k", "v"))}
    for name, like, dim in (("q", "q", dims[0]), ("do", "q", dims[1]), ("k", "k", dims[0]), ("v", "k", dims[1])):
        assert kernel.smem[name].bytes == slots[name] * rows[like] * -(-dim // PANEL) * PANEL_BYTES
        assert kernel.smem[f"{name}_barriers"].bytes == 16 * slots[name]
    if role == "main":
        assert kernel.smem["p"].bytes == value(kernel, "p_stages") * rows["k"] * rows["q"] * 2
    else:
        assert kernel.smem["stats"].bytes == 2 * 4 * rows["q"]
        # Slots of K and V share one count.
        assert all(slots[name] & (slots[name] - 1) == 0 for name in ("k", "v"))


@pytest.mark.parametrize("role", ROLES)
def test_the_producer_chooses_tiles_only_for_block_sparse_masks(role: str) -> None:
    for name, mask in MASKS.items():
        kernel = backward(role=role, mask=mask)
        assert ("block_sparse" in kernel.switches) == (name in ("documents", "global"))
        assert any(region.name == "messages" for region in kernel.smem.regions) == ("block_sparse" in kernel.switches)


@pytest.mark.parametrize("dims", WIDE_DIMS)
def test_tensor_maps_describe_the_tiles_of_the_plan(dims: tuple[int, int]) -> None:
    for role in ROLES:
        kernel = backward(dims, role)
        queries, keys = value(kernel, "tile_q"), value(kernel, "tile_kv")
        boxes = {box.tensor: (box.rows, box.columns, box.swizzle) for box in kernel.boxes}
        stats = {"row_stats": (1, queries, 0)} if role == "main" else {}
        tiles = dict.fromkeys(("q", "dout"), (queries, PANEL, 128)) | dict.fromkeys("kv", (keys, PANEL, 128))
        assert boxes == tiles | stats
        assert {box.parameter for box in kernel.boxes} <= set(kernel.params.names)


def test_nothing_is_summed_in_memory() -> None:
    made = plan(fg.AttentionSpec(256), None, ARCH)
    assert not made.has("finish")
    tile = value(made.kernel("main"), "tile_q")
    sizes = workspaces(made, Problem(3, 8, 2, 5 * tile + 1, 77))
    assert sizes == {"row_stats": 3 * 8 * 6 * tile * 2}
    assert value(made.kernel("query"), "stats_rows") == value(made.kernel("prepare"), "tile_q") == tile


def test_so_they_are_deterministic_too() -> None:
    for dims in WIDE_DIMS:
        for role in ("main", "query"):
            assert backward(dims, role, deterministic=True).algorithm == "FlashAttention-3"


def test_blocks_stay_and_take_one_tile_after_another() -> None:
    problem = Problem(3, 8, 2, 1000, 777)
    main, query = backward(mask=fg.causal()), backward(role="query", mask=fg.causal())
    keys, queries = -(-777 // value(main, "tile_kv")), -(-1000 // value(query, "tile_q"))
    assert main.grid(problem) == (keys * 2 * 3, 1, 1)
    assert query.grid(problem) == (queries * 8 * 3, 1, 1)
    assert tile_counts(query, problem)["q_tiles"] == queries
    assert {"counter", "tiles", "q_tiles", "kv_tiles", "query_flags"} <= set(main.params.names)


def test_the_comment_of_a_source_says_who_does_what() -> None:
    texts = {role: " ".join(header(backward(role=role, mask=fg.causal())).replace("//", "").split()) for role in ROLES}
    assert "2 compute, dV and dK of the same 64 keys" in texts["main"]
    assert "2 compute, 64 queries each" in texts["query"]
