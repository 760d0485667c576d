"""Planning the forward kernel for Hopper: what depends on the spec, and what a schedule may ask for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal

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


@pytest.mark.parametrize("mask", MASKS)
def test_values_are_scrubbed_only_where_a_mask_can_cut_a_tile(mask: str) -> None:
    kernel = forward(mask=MASKS[mask])
    names = {region.name for region in kernel.smem.regions}
    assert ("has_mask" in kernel.switches) == (mask != "full")
    assert ("recomputes" in names) == (mask != "full")


def test_the_producer_chooses_tiles_only_for_block_sparse_masks() -> None:
    holes = {name for name, mask in MASKS.items() if "block_sparse" in forward(mask=mask).switches}
    assert holes == {"documents", "global"}
    for name, mask in MASKS.items():
        assert any(region.name.startswith("sparse_") for region in forward(mask=mask).smem.regions) == (name in holes)


def test_the_longest_tiles_go_first_where_tiles_differ() -> None:
    assert {name for name, mask in MASKS.items() if forward(mask=mask).constant("longest_first")} == {*MASKS} - {"full"}


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_first_tiles_are_scrubbed_where_recomputing_them_is_expensive(dims: tuple[int, int]) -> None:
    """With wide values, with block-sparse masks, and from 96 columns on with windows; not without a mask."""

    def scrubs(mask: str) -> bool:
        return "scrubs_first" in forward(dims[0], head_dim_v=dims[1], mask=MASKS[mask]).switches

    assert [scrubs(mask) for mask in ("full", "causal", "window", "documents")] == [
        False,
        dims[1] > 128,
        dims[1] > 64,
        True,
    ]


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_there_is_room_for_a_bit_for_each_value_that_a_mask_cuts(dims: tuple[int, int]) -> None:
    """However many keys a tile has: those of a wide head under a cap leave the least."""
    for mask in (MASKS["causal"], MASKS["documents"]):
        for score in (None, fg.softcap(30.0)):
            kernel = forward(dims[0], head_dim_v=dims[1], mask=mask, score=score)
            bits = int(kernel.constant("tile_kv")) * dims[1]
            assert kernel.smem["scrubber"].bytes * 8 > int(kernel.constant("non_finite_records")) * bits
            assert kernel.smem["scrubber"].offset % 16 == 0
            assert kernel.smem.bytes <= ARCH.max_smem_per_block
    assert "scrubber" not in {region.name for region in forward(dims[0], head_dim_v=dims[1]).smem.regions}


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_what_is_bad_is_noted_for_each_slot_where_there_is_room_for_it(dims: tuple[int, int]) -> None:
    """Slots for keys and queries, and results on their way out, go before it."""
    kernel = forward(dims[0], head_dim_v=dims[1], mask=MASKS["causal"])
    non_finite_records, stages = int(kernel.constant("non_finite_records")), int(kernel.constant("stages"))
    notes = -(-dims[1] // 8 * 4 // 16) * 16 * 32
    assert non_finite_records == (stages if dims[0] in (64, 192) else 1)
    assert non_finite_records == stages or kernel.smem.bytes + notes > ARCH.max_smem_per_block


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_sections_have_as_many_columns_whatever_the_heads_are(dims: tuple[int, int]) -> None:
    causal, full = (forward(dims[0], head_dim_v=dims[1], mask=MASKS[name]) for name in ("causal", "full"))
    assert 4096 - dims[0] < int(causal.constant("section_heads")) * dims[0] <= 4096
    # Where all tiles are as long, one head after another shares its keys best.
    assert full.constant("section_heads") == 1


def test_the_next_tile_is_drawn_late_where_it_is_known_how_many_keys_are_left() -> None:
    late = {name for name, mask in MASKS.items() if forward(mask=mask).constant("draws_late")}
    assert late == {"full", "causal", "window"}
    # With holes it is known which ones are the last: that is enough where queries have no room before these are there.
    assert forward(256, mask=MASKS["documents"]).constant("draws_late")
    # Beside three consumers a producer has no registers for it where a band has two sides.
    assert not forward(64, mask=MASKS["window"]).constant("draws_late")
    wide = forward(256)
    assert (wide.constant("draws_late"), wide.constant("prefetches_next_k")) == (False, False)
    assert {s for s in (2, 3) if forward(schedule=fg.Schedule(stages=s)).constant("prefetches_next_k")} == {2}


def test_tensor_maps_describe_the_tiles_of_the_plan() -> None:
    kernel = forward(192, head_dim_v=128)
    boxes = {box.tensor: (box.rows, box.columns, box.swizzle) for box in kernel.boxes}
    keys = kernel.constant("tile_kv")
    assert boxes == {
        "q": (kernel.constant("q_rows"), 64, 128),
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


def test_it_alone_may_start_before_the_grid_before_it_ends() -> None:
    made: list[KernelPlan] = []
    for arch in ("sm_90a", "sm_90", "sm_80"):
        scores: tuple[Any, ...] = (None, fg.softcap(30.0), fg.alibi(np.zeros(2, np.float32)))
        for mask, score, ordered in product((fg.causal(), MASKS["documents"]), scores, (False, True)):
            made += plan(fg.AttentionSpec(128, mask=mask, score=score, deterministic=ordered), None, arch).kernels
        made += plan(fg.AttentionSpec(128, cache="paged", direction="forward"), None, arch).kernels
    assert {kernel.template for kernel in made if kernel.overlaps_predecessor} == {"forward_sm90.cu.j2"}
    assert all(kernel.overlaps_predecessor for kernel in made if kernel.template == "forward_sm90.cu.j2")
    assert len({kernel.template for kernel in made}) > 12


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_values_come_before_the_next_exponentials_where_two_other_warpgroups_have_products(
    dims: tuple[int, int],
) -> None:
    for mask in MASKS.values():
        kernel = forward(dims[0], head_dim_v=dims[1], mask=mask)
        assert ("values_first" in kernel.switches) == (kernel.constant("consumers") == 3)


def test_a_running_maximum_is_another_kernel_with_a_name_of_its_own() -> None:
    reference, running = forward(), forward(schedule=fg.Schedule(softmax="running-max"))
    assert (reference.constant("running_maximum"), running.constant("running_maximum")) == (False, True)
    assert running.name == reference.name.replace("_sm90a", "_runningmax_sm90a")
    # Exponentials take the place of scores, which nothing looks at a second time.
    assert (reference.constant("keeps_scores"), running.constant("keeps_scores")) == (True, False)


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_softcaps_have_no_scores_computed_twice(dims: tuple[int, int]) -> None:
    plain, softcap = (forward(dims[0], head_dim_v=dims[1], score=score) for score in (None, fg.softcap(30.0)))
    assert "capped" in softcap.switches
    assert softcap.constant("bounds_growth")
    assert "recompute_scores" not in softcap.switches
    # Where registers allow it scores are kept, and looked at only while exponentials are taken of them.
    assert ("keeps_scores" in softcap.switches) == (
        plain.switches & {"keeps_scores", "values_first"} == {"keeps_scores"}
    )
    for score in (fg.softcap(30.0) >> fg.softcap(40.0), fg.softcap(30.0) >> fg.alibi(np.zeros(2, np.float32))):
        assert "capped" not in forward(dims[0], head_dim_v=dims[1], score=score).switches
    running = forward(dims[0], head_dim_v=dims[1], score=fg.softcap(30.0), schedule=fg.Schedule(softmax="running-max"))
    assert not running.switches & {"recompute_scores", "keeps_scores"}
    assert not running.constant("bounds_growth")


HEAD_CAPS = np.array([30.0, 5.0], np.float32)


FINE, MODEST, HIGH, ANY = {"fine_cap"}, {"modest_cap"}, set[str](), {"any_cap"}


@pytest.mark.parametrize(
    ("score", "kind"),
    [
        (fg.softcap(30.0), FINE),
        (fg.softcap(50.0), FINE),
        (fg.softcap(0.01), FINE),
        (fg.softcap(0.0099), MODEST),
        (fg.softcap(50.5), MODEST),
        (fg.softcap(100.0), MODEST),
        (fg.softcap(100.5), HIGH),
        (fg.Score.of(lambda s, b, h, q, k: -5.0 * fg.tanh(s) / 0.1), FINE),
        (fg.Score.of(lambda s, b, h, q, k: -5.0 * fg.tanh(s) / 0.09), MODEST),
        # What comes with a call is not known.
        (fg.Score.of(lambda s, b, h, q, k: HEAD_CAPS[h] * fg.tanh(s)), ANY),
        (fg.Score.of(lambda s, b, h, q, k: fg.k_len * fg.tanh(s)), ANY),
    ],
)
def test_a_cap_that_is_known_to_be_low_has_fewer_ways_and_wider_tiles(score: fg.Score, kind: set[str]) -> None:
    kernel = forward(64, score=score)
    assert "capped" in kernel.switches
    assert kernel.switches & (FINE | MODEST | ANY) == kind
    assert ("modestcap" in kernel.name, "anycap" in kernel.name) == (kind == MODEST, kind in (HIGH, ANY))
    # Under others a consumer's warps vote in each step, where there are three consumers.
    votes = ["go_together" in forward(dim, score=score).switches for dim in (64, 128)]
    assert votes == [kind != FINE, False]
    # And results have one text in steps with the most ways.
    once = ["writes_once" in forward(dim, mask=MASKS["causal"], score=score).switches for dim in (64, 128)]
    assert once == [kind in (HIGH, ANY), False]
    assert forward(192, score=score).constant("tile_kv") == (112 if kind == FINE else 96)


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_rows_under_a_high_cap_use_the_running_max_unless_asked_for_the_reference_max(dims: tuple[int, int]) -> None:
    def kernel(cap: float, softmax: Literal["reference-max", "running-max"] | None = None) -> KernelPlan:
        schedule = fg.Schedule(softmax=softmax)
        return forward(dims[0], head_dim_v=dims[1], score=fg.softcap(cap), schedule=schedule)

    low, high, reference, running = (
        kernel(50.0),
        kernel(51.0),
        kernel(51.0, "reference-max"),
        kernel(51.0, "running-max"),
    )
    assert [k.constant("running_maximum") for k in (low, high, reference, running)] == [False, True, False, True]
    assert high.switches == running.switches == reference.switches
    assert [kernel.constant("bounds_growth") for kernel in (high, running, reference)] == [False, False, True]
    assert [any("use the running maximum" in reason for reason in k.reasons) for k in (low, high, reference)] == [
        False,
        True,
        False,
    ]


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


def test_queries_come_by_consumer_at_256_columns_where_no_mask_cuts_tiles() -> None:
    found = {
        (dims, name): tuple(kernel.constant(c) for c in ("q_rows", "q_slots", "ends_alone"))
        for dims, name in product(HEAD_DIMS, MASKS)
        for kernel in [forward(dims[0], head_dim_v=dims[1], mask=MASKS[name])]
    }
    assert found.pop(((256, 256), "full")) == (64, 2, True)
    assert set(found.values()) == {(192, 2, False), (128, 2, False), (128, 1, False)}


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_keys_have_a_slot_more_than_values_at_256_columns_where_there_is_room_for_it(dims: tuple[int, int]) -> None:
    for mask in MASKS.values():
        kernel = forward(dims[0], head_dim_v=dims[1], mask=mask)
        assert int(kernel.constant("k_slots")) - int(kernel.constant("stages")) == (dims == (256, 256))


def test_wider_tiles_of_keys_take_the_room_of_the_slot_that_is_only_good_to_have() -> None:
    wider = forward(256, fg.Schedule(tile_kv=80))
    assert [wider.constant(name) for name in ("tile_kv", "k_slots", "stages")] == [80, 2, 2]
    assert wider.smem.bytes <= ARCH.max_smem_per_block


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
    assert (usual.constant("q_slots"), "o_tile" in usual.switches) == (2, True)
    assert (deep.constant("q_slots"), "o_tile" in deep.switches) == (1, False)
    assert deep.constant("stages") == 3
    assert deep.smem.bytes <= ARCH.max_smem_per_block


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
