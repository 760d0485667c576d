"""Published tables about FlashAttention, from the model. Where theirs are rounded, a comment says so."""

from __future__ import annotations

import pytest

import flashgen as fg

HEAD = fg.AttentionSpec(64, dtype="fp16", direction="forward")
A100_SRAM = 192 * 1024


# Table "Memory complexity": N x N in fp16, for one head. Units of 10^6 or 10^9 bytes.
@pytest.mark.parametrize(
    ("length", "published"), [(1024, 2e6), (4096, 33e6), (16384, 536e6), (65536, 8.6e9), (131072, 34.4e9)]
)
def test_the_attention_matrix_in_fp16_takes_what_is_published(length: int, published: float) -> None:
    assert fg.lab.io_model(HEAD, length)["standard"].stored["P"] == pytest.approx(published, rel=0.05)


def test_standard_attention_of_4096_queries_moves_about_17_million_elements_per_pass() -> None:
    model = fg.lab.io_model(HEAD, 4096, sram=A100_SRAM)
    elements = model.formulas[0].elements
    assert elements == pytest.approx(17e6, rel=0.01)
    # With its constants the algorithm moves four times as many: S and P are both written and read.
    assert model["paper_standard"].total == 4 * 2 * elements
    # The kernels keep S in float32, and read operands once for each tile.
    assert model["standard"].total > model["paper_standard"].total


def test_the_lower_bound_at_4096_is_a_tenth_of_the_published_figure() -> None:
    # The published figure is 7M elements. N^2 d^2 / M with M = 192 * 512 elements of fp16 is 0.7M.
    model = fg.lab.io_model(HEAD, 4096, sram=A100_SRAM)
    assert model.sizes.sram_elements == 192 * 512
    assert model.lower_bound == 4096**2 * 64**2 / (192 * 512) == pytest.approx(0.7e6, rel=0.01)


def test_flash_attention_1_reaches_the_published_order_of_magnitude() -> None:
    # It moves Q, and O in float32 both ways, once per block of keys: about 8M words of 4 bytes.
    model = fg.lab.io_model(HEAD, 4096, sram=A100_SRAM)
    assert model["paper_fa1"].tile == (64, 384)
    moved = sum(model["paper_fa1"].kernels[1].reads.values()) + sum(model["paper_fa1"].kernels[1].writes.values())
    assert 4e6 < moved / 4 < 8e6


# Table "Memory savings": P in fp16 over O in fp16, whose exact ratio is N / d. The published ratios divide rounded
# megabytes, and take 8K for 131 MB where 8192^2 * 2 bytes are 134 MB.
@pytest.mark.parametrize(
    ("length", "standard", "flash", "ratio"),
    [(1024, 2e6, 0.13e6, 15), (2048, 8e6, 0.26e6, 30), (4096, 33e6, 0.52e6, 63), (8192, 131e6, 1.04e6, 126)],
)
def test_the_published_memory_savings_are_n_over_d(length: int, standard: float, flash: float, ratio: float) -> None:
    model = fg.lab.io_model(HEAD, length)
    matrix = model["standard"].stored["P"]
    assert matrix == pytest.approx(standard, rel=0.05)
    assert model.output == pytest.approx(flash, rel=0.02)
    assert matrix / model.output == length / 64
    assert matrix / model.output == pytest.approx(ratio, rel=0.07)


# "About 10x at 2K and 20x at 4K": the footprint of the whole operation, Q, K, V and O included, and one N x N matrix.
@pytest.mark.parametrize(("length", "published"), [(2048, 10), (4096, 20)])
def test_savings_of_the_whole_footprint_are_about_what_is_published(length: int, published: float) -> None:
    model = fg.lab.io_model(HEAD, length)
    arguments = model.inputs + model.output
    standard = arguments + model["standard"].stored["P"]
    flash = arguments + model["fa2"].memory
    assert standard / flash == pytest.approx(published, rel=0.2)
