"""Planning the forward kernel for Hopper: what depends on the spec, and what a schedule may ask for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import TABLE
from flashgen.plan.model.plans import KernelPlan, Problem

ARCH = get_arch("sm_90a")
#: Head dims that the schedule table has rows for.
HEAD_DIMS = list(TABLE)
IDS = np.zeros((2, 300), np.int32)
MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.window(100, 0),
    "documents": fg.document(IDS),
    "global": fg.window(64, 0) | fg.global_tokens(4),
}


def forward(
    dim: int = 128, schedule: fg.Schedule | None = None, *, arch: str = "sm_90a", access: int | None = None, **spec: Any
) -> KernelPlan:
    return plan(fg.AttentionSpec(dim, direction="forward", **spec), schedule, arch, access_bytes=access).kernel(
        "forward"
    )


# ---- what depends on the spec


@pytest.mark.parametrize("fields", [{}, {"varlen": True}, {"dropout": True}, {"varlen": True, "dropout": True}])
@pytest.mark.parametrize("dims", [*HEAD_DIMS, (8, 8), (40, 40), (72, 80), (80, 80), (112, 112), (200, 200), (128, 64)])
def test_it_is_planned_for_every_head_dim_packed_or_not_with_dropout_or_without(
    dims: tuple[int, int], fields: dict[str, bool]
) -> None:
    for mask in MASKS.values():
        kernel = forward(dims[0], head_dim_v=dims[1], mask=mask, **fields)
        assert kernel.algorithm == "FlashAttention-3"
        assert kernel.smem.bytes <= ARCH.max_smem_per_block
        # TMA fills the columns up to a product's step of 16 with zeros. Only those of the tensor are stored.
        columns = [int(kernel.constant(name)) for name in ("head_dim", "head_dim_v")]
        assert all(0 <= padded - dim < 16 and padded % 16 == 0 for padded, dim in zip(columns, dims, strict=True))
        assert kernel.constant("stored_columns") == dims[1]


def test_the_producer_chooses_tiles_only_for_block_sparse_masks() -> None:
    holes = {name for name, mask in MASKS.items() if "block_sparse" in forward(mask=mask).switches}
    assert holes == {"documents", "global"}
    for name, mask in MASKS.items():
        assert any(region.name == "messages" for region in forward(mask=mask).smem.regions) == (name in holes)


def test_sections_have_several_heads_where_tiles_differ_in_length() -> None:
    # The scheduler then also draws the longest tiles first.
    several = {name for name, mask in MASKS.items() if int(forward(mask=mask).constant("section_heads")) > 1}
    assert several == {*MASKS} - {"full"}


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_sections_have_as_many_columns_whatever_the_heads_are(dims: tuple[int, int]) -> None:
    causal, full = (forward(dims[0], head_dim_v=dims[1], mask=MASKS[name]) for name in ("causal", "full"))
    assert 4096 - dims[0] < int(causal.constant("section_heads")) * dims[0] <= 4096
    # Where all tiles are as long, one head after another shares its keys best.
    assert full.constant("section_heads") == 1


def test_tensor_maps_describe_the_tiles_of_the_plan() -> None:
    kernel = forward(192, head_dim_v=128)
    boxes = {box.tensor: (box.rows, box.columns, box.swizzle) for box in kernel.boxes}
    keys = kernel.constant("tile_kv")
    assert boxes == {
        "q": (kernel.constant("tile_q"), 64, 128),
        "k": (keys, 64, 128),
        "v": (keys, 64, 128),
        "o": (16, 64, 128),
    }
    assert {box.parameter for box in kernel.boxes} <= set(kernel.params.names)


def test_blocks_stay_and_take_one_tile_after_another() -> None:
    kernel = forward(mask=fg.causal())
    assert kernel.is_persistent
    tiles = -(-1000 // int(kernel.constant("tile_q")))
    assert kernel.grid(Problem(3, 8, 2, 1000, 77)) == (tiles * 8 * 3, 1, 1)
    assert {"counter", "q_tiles", "tiles"} <= set(kernel.params.names)


def test_kernels_for_hopper_may_start_before_the_grid_before_it_ends() -> None:
    made: list[KernelPlan] = []
    for arch in ("sm_90a", "sm_90", "sm_80"):
        scores: tuple[Any, ...] = (None, fg.softcap(30.0), fg.alibi(np.zeros(2, np.float32)))
        for mask, score, ordered in product((fg.causal(), MASKS["documents"]), scores, (False, True)):
            made += plan(fg.AttentionSpec(128, mask=mask, score=score, deterministic=ordered), None, arch).kernels
        made += plan(fg.AttentionSpec(128, cache="paged", direction="forward"), None, arch).kernels
    # Of the kernels for Hopper all may but the first one of a backward pass.
    hopper = {kernel.template for kernel in made if kernel.template.startswith("hopper/")}
    hopper.remove("hopper/backward_prepare.cu.j2")
    assert {kernel.template for kernel in made if kernel.overlaps_predecessor} == hopper
    assert all(kernel.overlaps_predecessor for kernel in made if kernel.template in hopper)
    assert len({kernel.template for kernel in made}) > 12


def test_a_running_maximum_is_another_kernel_with_a_name_of_its_own() -> None:
    reference, running = forward(), forward(schedule=fg.Schedule(softmax="running-max"))
    assert (reference.constant("anchored"), running.constant("anchored")) == (True, False)
    assert running.name == reference.name.replace("_sm90a", "_runningmax_sm90a")


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("fields", [{}, {"varlen": True}])
def test_there_is_room_to_announce_and_check_tiles(dims: tuple[int, int], fields: dict[str, bool]) -> None:
    """Each warp of the consumers checks each of four tiles: struct TileChecks."""
    kernel = forward(dims[0], head_dim_v=dims[1], **fields)
    warps = 4 * int(kernel.constant("consumers"))
    # A barrier, the tiles' numbers, each warp's checks, the list of tiles to repeat, and two counts.
    assert kernel.smem["checks"].bytes == -(-(8 + 4 * 4 + 4 * warps + 4 * 4 + 2 * 4) // 8) * 8
    assert kernel.smem["tiles"].bytes == 4 * (48 if fields else 32)
    assert kernel.smem["tiles"].offset % 16 == 0


# ---- what is asked for


def test_a_complete_schedule_is_what_the_kernel_gets() -> None:
    partition = fg.WarpPartition("specialized", consumers=2)
    asked = fg.Schedule(128, 96, 2, partition, algorithm="fa3", softmax="running-max", registers=(56, 224))
    made = plan(fg.AttentionSpec(64, direction="forward"), asked, ARCH)
    assert made.schedule == asked
    kernel = made.kernel("forward")
    names = ("tile_q", "tile_kv", "stages", "consumers", "producer_registers", "consumer_registers")
    assert [kernel.constant(name) for name in names] == [128, 96, 2, 2, 56, 224]
    assert kernel.threads == 384


def test_two_tiles_of_queries_are_under_way_up_to_128_columns() -> None:
    stages = {
        (dims, name): forward(dims[0], head_dim_v=dims[1], mask=MASKS[name]).constant("q_stages")
        for dims, name in product(HEAD_DIMS, MASKS)
    }
    assert all(count == (2 if dims[0] <= 128 else 1) for (dims, _), count in stages.items())


@pytest.mark.parametrize(("tile_q", "consumers"), [(128, 2), (192, 3)])
def test_a_tile_of_queries_says_how_many_warpgroups_compute_and_the_other_way_round(
    tile_q: int, consumers: int
) -> None:
    by_tile = forward(64, fg.Schedule(tile_q=tile_q))
    by_partition = forward(64, fg.Schedule(warps=fg.WarpPartition("specialized", consumers=consumers)))
    assert by_tile.config == by_partition.config
    assert (by_tile.constant("consumers"), by_tile.constant("tile_q")) == (consumers, tile_q)


def test_a_deeper_ring_takes_the_room_of_what_is_only_good_to_have() -> None:
    usual, deep = forward(), forward(schedule=fg.Schedule(stages=3))
    assert (usual.constant("q_stages"), "o" in usual.smem.names) == (2, True)
    assert (deep.constant("q_stages"), "o" in deep.smem.names) == (1, False)
    assert deep.constant("stages") == 3
    assert deep.smem.bytes <= ARCH.max_smem_per_block


def test_kernels_with_other_stages_have_other_names_and_say_how_many() -> None:
    kernels = [forward(64, fg.Schedule(stages=stages)) for stages in (2, 3, 4)]
    assert len({kernel.name for kernel in kernels}) == 3
    assert [kernel.stages for kernel in kernels] == [2, 3, 4]


SPECIALIZED = fg.WarpPartition("specialized", consumers=2)


@pytest.mark.parametrize(
    ("dim", "schedule", "words"),
    [
        (128, fg.Schedule(tile_q=96), ["tile_q=96 is not 64 rows for each of 2 or 3 consumers", "use 128 or 192"]),
        (128, fg.Schedule(tile_q=256), ["tile_q=256 is not 64 rows for each of 2 or 3 consumers", "use 128 or 192"]),
        (128, fg.Schedule(tile_q=64, warps=SPECIALIZED), ["tile_q=64", "2 or 3 consumers", "use 128 or 192"]),
        (64, fg.Schedule(tile_q=128, tile_kv=144), ["tile_kv=144 is more keys than", "use 128 or fewer"]),
        (256, fg.Schedule(tile_kv=256), ["tile_kv=256 is more keys than", "use 128 or fewer"]),
        (128, fg.Schedule(stages=1), ["stages=1 leaves no tile to copy into", "use stages=2 or more"]),
        (
            128,
            fg.Schedule(registers=(168, 240)),
            ["registers=(168, 240) for 1 producer and 2 consumers are more than the 64512", "use (40, 232)"],
        ),
        # As many as a multiprocessor has, but 384 threads begin with 168 each.
        (128, fg.Schedule(registers=(48, 232)), ["more than the 64512 that a block begins with", "use (40, 232)"]),
        (256, fg.Schedule(tile_kv=128), ["registers per thread", "consumers have 232", "use a smaller tile_kv"]),
        (128, fg.Schedule(tile_q=192), ["registers per thread", "consumers have 160", "fewer consumers"]),
        (128, fg.Schedule(stages=4), ["bytes of shared memory per block", "sm_90a has 232448", "fewer stages"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(dim: int, schedule: fg.Schedule, words: list[str]) -> None:
    with pytest.raises(fg.PlanError) as error:
        forward(dim, replace(schedule, algorithm="fa3"))
    for word in ("The forward kernel cannot be planned: ", *words):
        assert word in str(error.value)


def test_what_would_fit_does() -> None:
    for (dim, dim_v), stages, tile_kv in product(HEAD_DIMS, (1, 2, 4), (64, 128, 256)):
        try:
            forward(dim, fg.Schedule(stages=stages, tile_kv=tile_kv, algorithm="fa3"), head_dim_v=dim_v)
        except fg.PlanError as error:
            _, _, remedy = str(error).partition("What would fit: ")
            fields = dict(part.split("=") for part in remedy.rstrip(".").split(", "))
            forward(dim, fg.Schedule(**{name: int(value) for name, value in fields.items()}), head_dim_v=dim_v)
