"""``fg.lab.io_model``: each algorithm's bytes, worked out by hand for small sizes."""

from __future__ import annotations

import json

import pytest

import flashgen as fg
from flashgen.errors import ArgumentError, SpecError
from flashgen.lab.io.registry import MODELS
from flashgen.plan.model.plans import Pass

SPEC = fg.AttentionSpec(64, dtype="fp16")
#: Bytes of a matrix of 256 rows.
MATRIX = 256 * 64 * 2


def test_standard_attention_stores_s_and_p_and_reads_each_once() -> None:
    scores, softmax, output = fg.lab.io_model(SPEC, 256)["standard"].kernels
    # Two blocks along each side: both operands of QK^T are read twice, V twice, P once.
    assert (scores.reads, scores.writes) == ({"Q": 2 * MATRIX, "K": 2 * MATRIX}, {"S": 4 * 256**2})
    assert (softmax.reads, softmax.writes) == ({"S": 4 * 256**2}, {"P": 2 * 256**2, "LSE": 4 * 256})
    assert (output.reads, output.writes) == ({"P": 2 * 256**2, "V": 2 * MATRIX}, {"O": MATRIX})


def test_flash_attention_1_moves_its_state_with_every_block_of_keys() -> None:
    # M of 16384 elements gives B_c = 64 and B_r = 64: four blocks of keys.
    row = fg.lab.io_model(SPEC, 256, sram=32 * 1024)["fa1"]
    assert row.tile == (64, 64)
    initialise, forward = row.kernels
    state = {"O": 2 * MATRIX, "l": 4 * 256, "m": 4 * 256}
    assert initialise.writes == state
    assert forward.writes == {name: 4 * size for name, size in state.items()}
    assert forward.reads == {"K": MATRIX, "V": MATRIX, "Q": 4 * MATRIX, **forward.writes}


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


def test_naive_reads_all_keys_for_each_element_of_the_output() -> None:
    row = fg.lab.io_model(SPEC, 256)["naive"]
    threads = 256 * 64
    assert row.kernels[0].reads == {"Q": threads * 128, "K": threads * 256 * 128, "V": threads * 256 * 2}


def test_a_two_dimensional_grid_writes_partial_outputs_per_tile_of_keys() -> None:
    model = fg.lab.io_model(SPEC, 256, sram=64 * 1024)
    assert model["grid2d"].tile == (32, 32)
    floats = 4 * 256 * 8
    assert model["grid2d"].stored == {"maxima": floats, "sums": floats, "O partials": 64 * floats, "LSE": 4 * 256}
    assert model["grid2d"].kernels[0].reads["Q"] == 8 * MATRIX
    phases = model["grid2d_phased"].kernels
    assert [kernel.reads.get("Q", 0) for kernel in phases] == [8 * MATRIX, 8 * MATRIX, 0]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_traffic_falls_from_standard_to_flash_attention(pass_: Pass) -> None:
    model = fg.lab.io_model(SPEC, 8192, arch="sm_90a", pass_=pass_)
    assert model["standard"].total > model["fa2"].total
    assert model["standard"].memory > 10 * model["fa2"].memory
    assert model.traffic_savings("standard") == 1


def test_only_the_chosen_plan_claims_to_be_exact() -> None:
    assert [row.algorithm for row in fg.lab.io_model(SPEC, 256).rows if row.exact] == ["plan"]


def test_fa3_is_left_out_where_the_gpu_has_none() -> None:
    assert "fa3" not in fg.lab.io_model(SPEC, 256, arch="sm_80")
    assert "fa3" in fg.lab.io_model(SPEC, 256, arch="sm_90a")


def test_algorithms_without_a_backward_pass_are_left_out() -> None:
    rows = [row.algorithm for row in fg.lab.io_model(SPEC, 256, pass_="backward").rows]
    assert rows == ["standard", "fa1", "fa2", "plan"]


def test_every_algorithm_has_a_model() -> None:
    assert {"standard", "naive", "fa1", "grid1d", "grid2d", "fa2", "fa3"} <= set(MODELS)


def test_a_result_prints_as_a_table_as_json_and_as_html() -> None:
    model = fg.lab.io_model(SPEC, 1024)
    assert "lower bound N^2 d^2 / M" in str(model)
    found = json.loads(json.dumps(model.as_dict()))
    assert found["lower_bound_elements"] == 1024**2 * 64**2 / (163 * 1024 // 2)
    assert [row["algorithm"] for row in found["algorithms"]] == [row.algorithm for row in model.rows]
    assert model._repr_html_().count("<tr>") == 1 + len(model.rows)


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
