"""Planning the backward kernels for Hopper: what the table holds fits, and the others take other specs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.launch.call.prepared import tile_counts
from flashgen.plan import default_access_bytes, plan, workspaces
from flashgen.plan.algorithm import describe_algorithm
from flashgen.plan.hopper.backward import why_not_backward
from flashgen.plan.hopper.backward_tiles import HEAD_DIMS, NARROW_DIMS, padded
from flashgen.plan.hopper.units import registers_at_launch
from flashgen.plan.model.plans import KernelPlan, Problem
from flashgen.render import render
from flashgen.render.summary import header

ARCH = get_arch("sm_90a")
MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.window(100, 0),
    "documents": fg.document(np.zeros((2, 300), np.int32)),
    "global": fg.window(64, 0) | fg.global_tokens(4),
}
#: Bytes after which the pattern repeats in which TMA writes rows.
SWIZZLE = 1024


def backward(
    role: str = "main", schedule: fg.Schedule | None = None, access: int | None = None, **spec: Any
) -> KernelPlan:
    return plan(fg.AttentionSpec(**{"head_dim": 128} | spec), schedule, ARCH, access_bytes=access).kernel(role)


# ---- what the table holds


@pytest.mark.parametrize("dims", NARROW_DIMS)
def test_every_row_of_the_table_fits(dims: tuple[int, int]) -> None:
    choices = ("bf16", "fp16"), MASKS.values(), (None, fg.softcap(30.0)), (False, True)
    for dtype, mask, score, ordered in product(*choices):
        fields = {"dtype": dtype, "mask": mask, "score": score, "deterministic": ordered}
        kernel = backward(head_dim=dims[0], head_dim_v=dims[1], **fields)
        assert kernel.algorithm == "FlashAttention-3"
        consumers = int(kernel.constant("consumers"))
        assert kernel.constant("tile_kv") == kernel.grid_tile == 64 * consumers
        assert kernel.threads == 128 * (1 + consumers)
        assert kernel.smem.bytes <= ARCH.max_smem_per_block
        assert kernel.reasons
        assert all(kernel.reasons)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", NARROW_DIMS)
def test_roles_share_the_registers_that_a_block_begins_with(
    dims: tuple[int, int], mask: str, deterministic: bool
) -> None:
    """Not those of a multiprocessor: 384 threads begin with 168 each, and who asks for more than is left waits."""
    kernel = backward(head_dim=dims[0], head_dim_v=dims[1], mask=MASKS[mask], deterministic=deterministic)
    consumers = int(kernel.constant("consumers"))
    producer, consumer = (int(kernel.constant(f"{role}_registers")) for role in ("producer", "consumer"))
    at_launch = registers_at_launch(1 + consumers)
    assert at_launch * kernel.threads <= ARCH.registers_per_multiprocessor
    assert producer + consumers * consumer <= (1 + consumers) * at_launch
    assert producer <= at_launch <= consumer
    for registers in (producer, consumer):
        assert 24 <= registers <= 240
        assert registers % 8 == 0
    # dK, dV and two strips of scores at once, and a chunk of P rounded.
    tile_q = int(kernel.constant("tile_q"))
    assert sum(dims) // 2 + 2 * tile_q // 2 + 8 < consumer


@pytest.mark.parametrize("dims", NARROW_DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_shared_memory_is_divided_without_overlap_and_tiles_lie_where_their_pattern_begins(
    dims: tuple[int, int], mask: str
) -> None:
    kernel = backward(head_dim=dims[0], head_dim_v=dims[1], mask=MASKS[mask])
    end = 0
    for region in kernel.smem.regions:
        assert region.offset >= end, region
        assert region.offset % (SWIZZLE if region.name in ("k", "v", "q", "do", "ds") else 16) == 0, region
        end = region.offset + region.bytes
    tile_q, tile_kv = int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))
    rows = {"k": (1, tile_kv, dims[0]), "v": (1, tile_kv, dims[1])}
    rows |= {"q": (kernel.constant("q_stages"), tile_q, dims[0]), "do": (kernel.constant("do_stages"), tile_q, dims[1])}
    rows["ds"] = (kernel.constant("ds_stages"), tile_kv, tile_q)
    for name, (slots, height, width) in rows.items():
        # Rows come in panels of 64 columns.
        assert kernel.smem[name].bytes == slots * height * -(-width // 64) * 128
    for name, slots in (("lse", "q_stages"), ("dsum", "do_stages")):
        assert kernel.smem[name].bytes == kernel.constant(slots) * tile_q * 4
    for ring in ("q", "do", "ds"):
        assert kernel.smem[f"{ring}_barriers"].bytes == 16 * kernel.constant(f"{ring}_stages")
    # A warp's 16 rows of dK, or of dV, leave from where it puts its share of dQ.
    warps = 4 * int(kernel.constant("consumers"))
    assert kernel.smem["dq"].bytes >= warps * 16 * max(-(-dim // 64) for dim in dims) * 128


# ---- what depends on the spec


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_are_checked_and_repaired_only_where_a_mask_forbids_pairs(mask: str, dims: tuple[int, int]) -> None:
    made = plan(fg.AttentionSpec(dims[0], head_dim_v=dims[1], mask=MASKS[mask]), None, ARCH)
    backward = [kernel for kernel in made.kernels if kernel.pass_ == "backward"]
    assert made.has("repair") == (mask != "full")
    for kernel in backward:
        assert ("failed_tiles" in kernel.params.names) == (mask != "full"), kernel.name
        assert len({other.failures for other in backward}) == 1


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_other_head_dims_have_the_tiles_of_the_next_wider_ones(dim: int) -> None:
    for dim_v in {dim, 8, max(dim - 32, 8), min(dim + 8, 256), 256}:
        spec = fg.AttentionSpec(dim, head_dim_v=dim_v, mask=fg.causal())
        made, wide = plan(spec, None, ARCH), padded(spec)
        assert (wide.head_dim, wide.head_dim_v) in HEAD_DIMS
        assert wide.head_dim >= dim
        assert wide.head_dim_v >= dim_v
        same = plan(wide, None, ARCH)
        for role in ("main", "query"):
            assert made.has(role) == same.has(role)
            if not made.has(role):
                continue
            kernel, other = made.kernel(role), same.kernel(role)
            assert kernel.algorithm == "FlashAttention-3"
            assert (kernel.constant("head_dim"), kernel.constant("head_dim_v")) == (wide.head_dim, wide.head_dim_v)
            assert (kernel.smem, kernel.boxes, kernel.choice) == (other.smem, other.boxes, other.choice)
        if made.has("query"):
            assert made.kernel("query").constant("stored_columns") == dim
            main = made.kernel("main")
            assert (main.constant("stored_columns"), main.constant("stored_columns_v")) == (dim, dim_v)


def test_widths_are_padded_no_further_than_they_must_be() -> None:
    wider = {(8, 8): (64, 64), (80, 80): (96, 96), (128, 64): (128, 128), (136, 128): (192, 128), (40, 136): (192, 192)}
    for (dim, dim_v), dims in wider.items():
        wide = padded(fg.AttentionSpec(dim, head_dim_v=dim_v))
        assert (wide.head_dim, wide.head_dim_v) == dims


def test_there_is_a_flag_for_each_tile_of_gradients_and_each_head() -> None:
    made = plan(fg.AttentionSpec(128, mask=fg.causal()), None, ARCH)
    problem = Problem(3, 8, 2, 1000, 777)
    main, repair = made.kernel("main"), made.kernel("repair")
    tiles_q, tiles_kv = -(-1000 // int(main.constant("tile_q"))), -(-777 // int(main.constant("tile_kv")))
    flags = 3 * 8 * tiles_q + 3 * 2 * tiles_kv
    assert workspaces(made, problem)["failed_tiles"] == flags
    for role in ("prepare", "main", "repair"):
        counts = tile_counts(made.kernel(role), problem)
        assert (counts["query_flags"], counts["flags"]) == (3 * 8 * tiles_q, flags)
    assert repair.grid(problem) == (-(-flags // 32), 1, 1)
    assert [repair.constant(f"tile_{side}") for side in ("q", "kv")] == [
        main.constant(f"tile_{side}") for side in ("q", "kv")
    ]


def test_the_producer_chooses_tiles_only_for_block_sparse_masks() -> None:
    assert {name for name, mask in MASKS.items() if "block_sparse" in backward(mask=mask).switches} == {
        "documents",
        "global",
    }
    for mask in MASKS.values():
        kernel = backward(mask=mask)
        assert any(region.name == "messages" for region in kernel.smem.regions) == ("block_sparse" in kernel.switches)


def test_a_log_sum_exp_is_divided_by_the_scale_where_logits_are_products() -> None:
    sink = fg.sink(np.zeros(4, np.float32))
    for score, scales in ((None, True), (sink, True), (fg.softcap(30.0), False), (fg.softcap(30.0) >> sink, False)):
        assert ("using Scoring = NoScore;" in render(backward(score=score)).text) == scales
        assert ("constexpr bool kScales = true;" in render(backward("prepare", score=score)).text) == scales
        assert backward(score=score).divides_by_scale == scales
        # Nothing is copied by boxes there, and nothing is to be said about the scale twice.
        assert not backward("prepare", score=score).divides_by_scale


@pytest.mark.parametrize("dims", NARROW_DIMS)
def test_tensor_maps_describe_the_tiles_of_the_plan(dims: tuple[int, int]) -> None:
    kernel = backward(head_dim=dims[0], head_dim_v=dims[1])
    queries, keys = (int(kernel.constant(name)) for name in ("tile_q", "tile_kv"))
    boxes = {box.tensor: (box.rows, box.columns, box.swizzle) for box in kernel.boxes}
    assert {name: boxes[name] for name in ("q", "k", "v", "dout", "dk", "dv")} == {
        "q": (queries, 64, 128),
        "k": (keys, 64, 128),
        "v": (keys, 64, 128),
        "dout": (queries, 64, 128),
        "dk": (16, 64, 128),
        "dv": (16, 64, 128),
    }
    assert {box.parameter for box in kernel.boxes} <= set(kernel.params.names)


def test_blocks_stay_and_take_one_tile_of_keys_after_another() -> None:
    kernel = backward(mask=fg.causal())
    assert kernel.is_persistent
    problem = Problem(3, 8, 2, 1000, 777)
    tiles_q, tiles_kv = -(-1000 // int(kernel.constant("tile_q"))), -(-777 // int(kernel.constant("tile_kv")))
    assert kernel.grid(problem) == (tiles_kv * 2 * 3, 1, 1)
    counts = tile_counts(kernel, problem)
    tiles = {"tiles": tiles_kv * 2 * 3, "q_tiles": tiles_q, "kv_tiles": tiles_kv}
    flags = {"query_flags": 3 * 8 * tiles_q, "flags": 3 * 8 * tiles_q + 3 * 2 * tiles_kv}
    assert counts == {**tiles, "sum_heads": 3 * 8, **flags}
    assert {"counter", *tiles, "sum_heads", "query_flags"} <= set(kernel.params.names)


def test_statistics_are_two_floats_for_each_query_of_each_tile() -> None:
    made = plan(fg.AttentionSpec(128), None, ARCH)
    tile = int(made.kernel("main").constant("tile_q"))
    assert workspaces(made, Problem(3, 8, 2, 5 * tile + 1, 77))["row_stats"] == 3 * 8 * 6 * tile * 2


def test_kernels_of_a_pass_agree_on_the_tile_of_queries() -> None:
    for dims in NARROW_DIMS:
        made = plan(fg.AttentionSpec(dims[0], head_dim_v=dims[1]), None, ARCH)
        tiles = {int(k.constant("tile_q")) for k in made.kernels if k.pass_ == "backward"}
        assert len(tiles) == 1


def test_a_bias_has_its_gradient_beside_these_kernels() -> None:
    made = plan(fg.AttentionSpec(64, score=fg.bias(np.zeros((1, 1, 70, 90), np.float32))), None, ARCH)
    assert made.kernel("main").algorithm == "FlashAttention-3"
    assert any(k.role.startswith("captured_tile") for k in made.kernels)


# ---- specs that use the kernels for all GPUs

FALLBACKS: dict[str, tuple[dict[str, Any], fg.Schedule | None, str, str]] = {
    "asked for": ({}, fg.Schedule(algorithm="fa2"), "sm_90a", "its schedule says algorithm='fa2'"),
    "generation": ({}, None, "sm_90", "it needs sm_90a, and this is sm_90"),
    "later generation": ({}, None, "sm_100a", "it needs sm_90a, and this is sm_100a"),
    "fp32": ({"dtype": "fp32"}, None, "sm_90a", "take fp16, bf16 and e4m3, and dtype is 'fp32'"),
    "head_dim": ({"head_dim": 60}, None, "sm_90a", "head dims must be multiples of 8"),
    "head_dim_v": ({"head_dim_v": 100}, None, "sm_90a", "head dims must be multiples of 8"),
    "tiles": (
        {},
        fg.Schedule(backward=fg.BackwardSchedule(tile_q=32)),
        "sm_90a",
        "a schedule for the backward pass applies to the portable kernels",
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_they_cannot_be_runs_by_the_kernels_for_all_gpus_and_there_is_a_reason(name: str) -> None:
    fields, schedule, arch, words = FALLBACKS[name]
    spec = fg.AttentionSpec(**{"head_dim": 128} | fields)
    made = plan(spec, schedule, arch)
    main = made.kernel("main")
    assert (main.template, main.algorithm, main.boxes) == ("backward_main.cu.j2", "FlashAttention-2", ())
    assert "row_stats" not in made.kernel("prepare").params.names
    reason = why_not_backward(spec, schedule or fg.Schedule(), get_arch(arch), default_access_bytes(spec))
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("access", [2, 4, 8])
def test_less_aligned_tensors_run_by_the_kernels_for_all_gpus(access: int) -> None:
    kernel = backward(access=access)
    assert (kernel.algorithm, kernel.access_bytes) == ("FlashAttention-2", access)
    reason = why_not_backward(kernel.spec, fg.Schedule(), ARCH, access)
    assert reason == "TMA needs tensors aligned to 16 bytes"


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_what_they_can_be_has_no_reason_against_it(dims: tuple[int, int]) -> None:
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1])
    forward_only = fg.Schedule(softmax="running-max", stages=3)
    for schedule in (fg.Schedule(), fg.Schedule(algorithm="fa3"), forward_only):
        assert why_not_backward(spec, schedule, ARCH, 16) is None


def test_passes_need_not_run_by_the_same_algorithm() -> None:
    """A schedule of the forward pass is no reason against the backward kernels, nor the other way round."""
    made = plan(fg.AttentionSpec(128), fg.Schedule(tile_q=64), ARCH)
    assert [made.kernel(role).algorithm[-1] for role in ("forward", "main")] == ["2", "3"]
    made = plan(fg.AttentionSpec(128), fg.Schedule(backward=fg.BackwardSchedule(tile_q=32)), ARCH)
    assert [made.kernel(role).algorithm[-1] for role in ("forward", "main")] == ["3", "2"]


# ---- what is said of them


def test_the_comment_of_a_source_says_who_does_what_and_why() -> None:
    text = header(backward(mask=fg.causal()))
    kernel = backward(mask=fg.causal())
    for words in (
        "backward_main_d128_causal_sm90a: FlashAttention-3, backward pass",
        f"tile_q {kernel.constant('tile_q')}, tile_kv {kernel.constant('tile_kv')}",
        f"one warp brings tiles, and three finish dQ ({kernel.constant('producer_registers')} registers a thread)",
        f"2 compute, 64 keys each ({kernel.constant('consumer_registers')})",
        kernel.reasons[0],
    ):
        assert words in " ".join(text.replace("//", "").split()), words
    assert "not FlashAttention-3" not in text


def test_the_comment_says_what_else_it_is_and_why() -> None:
    schedule = fg.Schedule(backward=fg.BackwardSchedule(tile_q=32))
    kernel = backward(schedule=schedule)
    words = "FlashAttention-2, not FlashAttention-3: a schedule for the backward pass applies to the portable kernels"
    assert describe_algorithm(kernel) == words
    text = " ".join(header(kernel).replace("//", "").split())
    assert "not FlashAttention-3: a schedule for the backward pass applies to the portable kernels" in text
    # There it is said once, of the kernel that could be another.
    for role in ("prepare", "finish"):
        assert "not FlashAttention-3" not in header(plan(kernel.spec, schedule, ARCH).kernel(role))


def test_the_chosen_schedule_asked_for_again_is_the_same_plan() -> None:
    for dims in HEAD_DIMS:
        chosen = plan(fg.AttentionSpec(dims[0], head_dim_v=dims[1], mask=fg.causal()), None, ARCH)
        again = plan(chosen.spec, chosen.schedule, ARCH)
        for one, other in zip(chosen.kernels, again.kernels, strict=True):
            assert replace(one, schedule=None) == replace(other, schedule=None)


def test_biases_of_16_bits_come_ahead_unless_a_mask_takes_the_registers() -> None:
    bias = fg.bias(np.zeros((2, 2), np.float16))
    wide = fg.bias(np.zeros((2, 2), np.float32))
    for score, mask, ahead in (
        (bias, MASKS["full"], True),
        (bias, MASKS["causal"], True),
        (bias, MASKS["documents"], False),
        (wide, MASKS["full"], False),
        (None, MASKS["full"], False),
    ):
        for dim, _ in NARROW_DIMS:
            assert ("loads_ahead" in backward(head_dim=dim, score=score, mask=mask).switches) == ahead
