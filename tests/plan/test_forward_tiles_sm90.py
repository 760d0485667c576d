"""The schedule table of the forward kernel for Hopper: every row fits, and masks and scores
have the tiles for which they leave registers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan import plan
from flashgen.plan.hopper.units import registers_at_launch
from tests.plan.test_forward_sm90 import ARCH, HEAD_DIMS, MASKS, forward

#: Bytes after which the pattern repeats in which TMA writes rows.
SWIZZLE = 1024


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_every_row_of_the_table_fits(dims: tuple[int, int]) -> None:
    for dtype, mask, score in product(("bf16", "fp16"), MASKS.values(), (None, fg.softcap(30.0))):
        kernel = forward(dims[0], head_dim_v=dims[1], dtype=dtype, mask=mask, score=score)
        assert kernel.algorithm == "FlashAttention-3"
        consumers = int(kernel.constant("consumers"))
        assert kernel.constant("tile_q") == 64 * consumers
        assert kernel.threads == 128 * (1 + consumers)
        assert kernel.smem.bytes <= ARCH.max_smem_per_block
        registers = int(kernel.constant("producer_registers")) + consumers * int(kernel.constant("consumer_registers"))
        assert registers <= (1 + consumers) * registers_at_launch(1 + consumers)
        assert kernel.reasons
        assert all(kernel.reasons)


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_score_that_reads_an_element_for_each_pair_gets_smaller_tiles(dims: tuple[int, int], mask: str) -> None:
    def tile_kv(score: fg.Score | None) -> int:
        kernel = forward(dims[0], head_dim_v=dims[1], mask=MASKS[mask], score=score)
        assert kernel.algorithm == "FlashAttention-3"
        return int(kernel.constant("tile_kv"))

    relative, slopes = fg.relative_bias(np.zeros((2, 9), np.float32)), fg.alibi(np.zeros(2, np.float32))
    assert tile_kv(relative) <= tile_kv(slopes) <= tile_kv(None)
    # They are as small as that without a score where the mask asks much of each pair.
    assert tile_kv(relative) < tile_kv(slopes) or (mask, dims) in [("global", (128, 128)), ("global", (192, 128))]
    # What comes before the products takes fewer registers than what is asked for then.
    bias, wide = (fg.bias(np.zeros((2, 2, 2, 2), dtype)) for dtype in (np.float16, np.float64))
    capped = fg.softcap(3.0) >> bias
    assert tile_kv(wide) == tile_kv(relative) <= tile_kv(capped) <= tile_kv(bias) <= tile_kv(slopes)


def test_tiles_are_as_wide_as_a_mask_and_a_score_leave_registers_for() -> None:
    def tile_kv(**spec: Any) -> int:
        return int(forward(64, **spec).constant("tile_kv"))

    ids, slopes = np.zeros((2, 9), np.int32), fg.alibi(np.zeros(2, np.float32))
    bias = fg.bias(np.zeros((2, 2), np.float16))
    assert {tile_kv(mask=fg.window(99, 9), score=score) for score in (None, slopes, fg.sink(np.zeros(2)))} == {128}
    # A softcap takes no registers beside the exponentials.
    assert [tile_kv(mask=fg.window(99, 9), score=fg.softcap(cap)) for cap in (3.0, 300.0)] == [128, 128]
    assert tile_kv(mask=fg.causal(), score=fg.softcap(3.0) >> slopes) == 112
    assert (tile_kv(mask=fg.prefix_lm(9)), tile_kv(mask=fg.prefix_lm(9), score=slopes)) == (112, 96)
    assert (tile_kv(mask=fg.prefix_lm(9) | fg.global_tokens(9)), tile_kv(mask=fg.dilated(9))) == (96, 96)
    assert (tile_kv(score=bias), tile_kv(mask=fg.causal(), score=bias)) == (96, 80)
    documents = forward(64, mask=fg.causal() & fg.document(ids))
    assert (documents.constant("tile_q"), documents.constant("tile_kv")) == (128, 128)


def test_what_a_mask_asks_of_one_pair_after_another_makes_tiles_smaller() -> None:
    def tile_kv(mask: fg.Mask, dim: int = 128, dim_v: int = 0) -> int:
        return int(forward(dim, head_dim_v=dim_v, mask=mask).constant("tile_kv"))

    documents, wide = fg.document(np.zeros((2, 9), np.int32)), fg.window(64, 64)
    # The order of keys and which document they are of leave room, each of them and together.
    assert {tile_kv(mask) for mask in (fg.prefix_lm(9), documents, fg.causal() & documents)} == {128}
    assert {tile_kv(mask) for mask in (fg.chunked(9), fg.dilated(3), fg.window(64, 0) & documents)} == {96}
    assert {tile_kv(mask) for mask in (wide | fg.global_tokens(9), fg.causal() & fg.dilated(3))} == {80}
    assert [tile_kv(wide & fg.dilated(3), *dims) for dims in HEAD_DIMS] == [64, 96, 80, 80, 80, 64]
    assert [tile_kv(wide & documents, *dims) for dims in HEAD_DIMS[:3]] == [64, 96, 80]


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_a_pattern_that_is_looked_up_takes_registers_of_the_producer(dims: tuple[int, int]) -> None:
    pattern = fg.block_sparse(np.zeros((2, 2), bool))
    bias = fg.bias(np.zeros((2, 2), np.float16))
    alone, biased = (forward(dims[0], head_dim_v=dims[1], mask=pattern, score=score) for score in (None, bias))
    registers = 80 if dims == (256, 256) else 88
    assert alone.constant("producer_registers") == biased.constant("producer_registers") == registers
    # No tile of keys is cut by blocks of 64.
    assert int(alone.constant("tile_kv")) == (32 if dims == (256, 256) else 64)
    assert int(biased.constant("tile_kv")) == (32 if dims[0] >= 192 else 64)


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_shared_memory_is_divided_without_overlap_and_tiles_lie_where_their_pattern_begins(
    dims: tuple[int, int], mask: str
) -> None:
    kernel = forward(dims[0], head_dim_v=dims[1], mask=MASKS[mask])
    end = 0
    for region in kernel.smem.regions:
        assert region.offset >= end, region
        assert region.offset % (SWIZZLE if region.name in "qkvo" else 8) == 0, region
        end = region.offset + region.bytes
    widths = {"q": dims[0], "k": dims[0], "v": dims[1], "o": dims[1]}
    rows = {name: int(kernel.constant("tile_q" if name in "qo" else "tile_kv")) for name in widths}
    slots = {"q": "q_stages", "k": "stages", "v": "stages"}
    for name, width in widths.items():
        if name == "o" and "o" not in kernel.smem.names:
            continue
        count = int(kernel.constant(slots[name])) if name in slots else 1
        # Rows come in panels of 64 columns.
        assert kernel.smem[name].bytes == count * rows[name] * -(-width // 64) * 128


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_the_chosen_schedule_asked_for_again_is_the_same_plan(dims: tuple[int, int], mask: str) -> None:
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], mask=MASKS[mask])
    for asked in (None, fg.Schedule(softmax="running-max"), fg.Schedule(tile_q=64, tile_kv=64)):
        chosen = plan(spec, asked, ARCH)
        again = plan(spec, chosen.schedule, ARCH)
        assert again.schedule == chosen.schedule
        for one, other in zip(chosen.kernels, again.kernels, strict=True):
            assert (one.name, one.config, one.smem, one.switches) == (
                other.name,
                other.config,
                other.smem,
                other.switches,
            )


def test_what_is_left_out_of_a_schedule_says_what_was_chosen() -> None:
    chosen = plan(fg.AttentionSpec(128, direction="forward"), None, ARCH).schedule
    assert chosen.warps == fg.WarpPartition("specialized", producers=1, consumers=2)
    assert (chosen.algorithm, chosen.softmax) == ("fa3", "reference-max")
    assert chosen.registers is not None


def test_beside_three_consumers_a_producer_of_biases_and_two_sides_has_more_registers() -> None:
    bias = fg.bias(np.zeros((2, 2), np.float32))

    def registers(dim: int, mask: fg.Mask) -> int | str:
        return forward(dim, mask=mask, score=bias).constant("producer_registers")

    assert [registers(64, mask) for mask in (fg.causal(), fg.window(300, 40))] == [32, 40]
    assert registers(128, fg.window(300, 40)) == registers(128, fg.causal())
