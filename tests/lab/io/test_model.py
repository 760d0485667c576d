"""``fg.lab.io_model``: each algorithm's bytes, worked out by hand for small sizes."""

from __future__ import annotations

import json

import pytest

import flashgen as fg
from flashgen.errors import ArgumentError, SpecError
from flashgen.lab.io.registry import KERNELS
from flashgen.plan.model.plans import Pass

SPEC = fg.AttentionSpec(64, dtype="fp16")
#: Bytes of a matrix of 256 rows.
MATRIX = 256 * 64 * 2


def test_the_papers_standard_attention_moves_each_array_once_per_step() -> None:
    model = fg.lab.io_model(SPEC, 256)
    scores, softmax, output = model["paper_standard"].kernels
    assert (scores.reads, scores.writes) == ({"Q": MATRIX, "K": MATRIX}, {"S": 2 * 256**2})
    assert (softmax.reads, softmax.writes) == ({"S": 2 * 256**2}, {"P": 2 * 256**2})
    assert (output.reads, output.writes) == ({"P": 2 * 256**2, "V": MATRIX}, {"O": MATRIX})
    assert model["paper_standard"].basis == "paper"
    # Its order of growth, with the constant 1, is a row of its own.
    assert model.formulas[0].elements == 256 * 64 + 256**2


def test_kernels_of_standard_attention_store_s_and_p_and_read_operands_for_each_tile() -> None:
    scores, softmax, output = fg.lab.io_model(SPEC, 256)["standard"].kernels
    # Two blocks along each side: both operands of QK^T are read twice, V twice, P once.
    assert (scores.reads, scores.writes) == ({"Q": 2 * MATRIX, "K": 2 * MATRIX}, {"S": 4 * 256**2})
    assert (softmax.reads, softmax.writes) == ({"S": 4 * 256**2}, {"P": 2 * 256**2, "LSE": 4 * 256})
    assert (output.reads, output.writes) == ({"P": 2 * 256**2, "V": 2 * MATRIX}, {"O": MATRIX})


def test_the_papers_flash_attention_1_moves_its_state_with_every_block_of_keys() -> None:
    # M of 16384 elements gives B_c = 64 and B_r = 64: four blocks of keys.
    row = fg.lab.io_model(SPEC, 256, sram=32 * 1024)["paper_fa1"]
    assert row.tile == (64, 64)
    initialise, forward = row.kernels
    state = {"O": 2 * MATRIX, "l": 4 * 256, "m": 4 * 256}
    assert initialise.writes == state
    assert forward.writes == {name: 4 * size for name, size in state.items()}
    assert forward.reads == {"K": MATRIX, "V": MATRIX, "Q": 4 * MATRIX, **forward.writes}


def test_the_kernel_of_flash_attention_1_moves_its_state_with_every_tile_of_keys() -> None:
    # A tile has 256 keys: two steps for each tile of queries, and the state is cleared before and read after them.
    (forward,) = fg.lab.io_model(SPEC, 512)["fa1"].kernels
    o, rows = 512 * 64 * 4, 512 * 4
    assert forward.writes == {"O in float32": 3 * o, "l": 3 * rows, "m": 3 * rows, "O": 2 * MATRIX, "LSE": rows}
    assert forward.reads["O in float32"] == 3 * o
    assert (forward.reads["Q"], forward.reads["K"]) == (4 * MATRIX, 2 * MATRIX)


def test_flash_attention_2_reads_keys_once_per_tile_of_queries() -> None:
    row = fg.lab.io_model(SPEC, 256, schedule=fg.Schedule(tile_q=64, tile_kv=32))["plan"]
    assert row.tile == (64, 32)
    assert row.kernels[0].reads == {"Q": MATRIX, "K": 4 * MATRIX, "V": 4 * MATRIX}
    assert row.kernels[0].writes == {"O": MATRIX, "LSE": 4 * 256}


def test_a_causal_mask_skips_tiles() -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal())
    row = fg.lab.io_model(spec, 256, schedule=fg.Schedule(tile_q=64, tile_kv=64))["plan"]
    assert row.kernels[0].reads["K"] == (1 + 2 + 3 + 4) * MATRIX // 4


def test_heads_of_a_group_share_keys_in_memory_and_read_them_each() -> None:
    model = fg.lab.io_model(SPEC, 256, heads=8, heads_kv=2, schedule=fg.Schedule(tile_q=64, tile_kv=64))
    assert model.inputs == (8 + 2 + 2) * MATRIX
    assert model["plan"].kernels[0].reads["K"] == 8 * 4 * MATRIX


def test_naive_reads_its_query_and_a_key_for_each_pair_and_element_of_the_output() -> None:
    visits = 256 * 64 * 256
    row = fg.lab.io_model(SPEC, 256)["naive"]
    assert row.kernels[0].reads == {"Q": visits * 128, "K": visits * 128, "V": visits * 2}
    spec = fg.AttentionSpec(64, dtype="fp16", mask=fg.window(2, 1))
    # Four of 256 x 4 pairs lie before the first key or behind the last one.
    assert fg.lab.io_model(spec, 256)["naive"].kernels[0].reads["V"] == (4 * 256 - 1 - 2 - 1) * 64 * 2


def test_a_two_dimensional_grid_writes_partial_outputs_per_tile_of_keys() -> None:
    model = fg.lab.io_model(SPEC, 256)
    assert model["grid2d"].tile == (64, 64)
    floats = 4 * 256 * 4
    for name in ("grid2d", "grid2d_phased"):
        assert model[name].stored == {"maxima": floats, "sums": floats, "O partials": 64 * floats, "LSE": 4 * 256}
    assert model["grid2d"].kernels[0].reads["Q"] == 4 * MATRIX
    phases = model["grid2d_phased"].kernels
    assert [kernel.reads.get("Q", 0) for kernel in phases] == [4 * MATRIX, 4 * MATRIX, 0]
    # Each of 16 tiles reads the maxima of its 64 rows over four tiles of keys.
    assert phases[1].reads["maxima"] == 16 * 64 * 4 * 4


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_traffic_falls_from_standard_to_flash_attention(pass_: Pass) -> None:
    model = fg.lab.io_model(SPEC, 8192, arch="sm_90a", pass_=pass_)
    assert model["standard"].total > model["fa2"].total
    assert model["standard"].memory > 10 * model["fa2"].memory
    assert model.traffic_savings("paper_standard") == 1


def test_kernels_claim_to_be_exact_and_papers_do_not() -> None:
    for row in fg.lab.io_model(SPEC, 256).rows:
        assert row.exact == (row.basis == "kernel")
        assert row.algorithm.startswith("paper") == (row.basis == "paper")


def test_algorithms_without_kernels_for_the_spec_are_left_out() -> None:
    model = fg.lab.io_model(fg.AttentionSpec(256, dtype="fp16", mask=lambda b, h, q, k: q % 7 == k % 7), 256)
    assert [row.algorithm for row in model.rows] == ["paper_standard", "paper_fa1", "fa2", "plan"]
    assert model.traffic_savings("fa2") > 0


def test_fa3_is_left_out_where_the_gpu_has_none() -> None:
    assert "fa3" not in fg.lab.io_model(SPEC, 256, arch="sm_80")
    assert "fa3" in fg.lab.io_model(SPEC, 256, arch="sm_90a")


def test_algorithms_without_a_backward_pass_are_left_out() -> None:
    rows = [row.algorithm for row in fg.lab.io_model(SPEC, 256, pass_="backward").rows]
    assert rows == ["paper_standard", "paper_fa1", "standard", "standard_stored_p", "fa1", "fa2", "plan"]


def test_a_backward_pass_that_gets_p_runs_no_kernel_and_has_no_memory_for_scores() -> None:
    model = fg.lab.io_model(SPEC, 256, pass_="backward")
    again, given = model["standard"], model["standard_stored_p"]
    assert given.stored == {"D": 4 * 256, "P": 2 * 256**2, "dS": 2 * 256**2}
    assert again.stored == given.stored | {"S": 4 * 256**2}
    assert [kernel.name for kernel in again.kernels[:2]] == ["scores", "softmax"]
    assert again.kernels[2:] == given.kernels


def test_every_algorithm_has_a_row() -> None:
    assert {"standard", "naive", "fa1", "grid1d", "grid2d", "fa2", "fa3"} <= set(KERNELS)


def test_a_result_prints_as_a_table_as_json_and_as_html() -> None:
    model = fg.lab.io_model(SPEC, 1024)
    assert "lower bound N^2 d^2 / M" in str(model)
    found = json.loads(json.dumps(model.as_dict()))
    assert found["lower_bound_elements"] == 1024**2 * 64**2 / (163 * 1024 // 2)
    assert [row["formula"] for row in found["formulas"]] == ["Nd + N^2", "N^2 d^2 / M"]
    assert [row["algorithm"] for row in found["algorithms"]] == [row.algorithm for row in model.rows]
    assert model._repr_html_().count("<tr>") == 1 + len(model.formulas) + len(model.rows)


def test_an_empty_call_moves_no_pairs() -> None:
    model = fg.lab.io_model(SPEC, 0, 128)
    assert model["standard"].kernels[0].total == 0
    assert model["plan"].total == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3, "heads_kv": 2}, "heads=3 is not a multiple of heads_kv=2"),
        ({"batch": 0}, "batch=0 is out of range"),
        ({"sram": 10}, "sram=10 is out of range"),
        ({"pass_": "sideways"}, "use 'forward' or 'backward'"),
    ],
)
def test_wrong_sizes_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fg.lab.io_model(SPEC, 256, **options)  # type: ignore[arg-type]


def test_specs_without_one_length_or_one_pass_are_refused() -> None:
    with pytest.raises(ArgumentError, match="lengths of its own"):
        fg.lab.io_model(fg.AttentionSpec(64, varlen=True), 256)
    with pytest.raises(ArgumentError, match="backward pass"):
        fg.lab.io_model(fg.AttentionSpec(64, direction="forward"), 256, pass_="backward")
    with pytest.raises(SpecError, match="not an AttentionSpec"):
        fg.lab.io_model(64, 256)  # type: ignore[arg-type]


def test_a_million_queries_take_no_matrix_of_tiles() -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal())
    row = fg.lab.io_model(spec, 2**20, schedule=fg.Schedule(tile_q=64, tile_kv=64))["plan"]
    tiles = 2**20 // 64
    assert row.kernels[0].reads["K"] == tiles * (tiles + 1) // 2 * 64 * 128


def test_more_tiles_than_can_be_tested_one_by_one_are_refused() -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", mask=lambda b, h, q, k: (q // 128 == k // 128) | (q % 7 == 0))
    with pytest.raises(ArgumentError, match="use shorter lengths or larger tiles"):
        fg.lab.io_model(spec, 2**22)
