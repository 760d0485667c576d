"""``flashgen io``."""

from __future__ import annotations

import json
from typing import Any

import flashgen as fg


def test_the_table_is_that_of_the_model_and_the_memory(flashgen: Any) -> None:
    result = flashgen("io", "--len", "4096", "--head-dim", "64", "--causal", "--sram", "192KiB", "--arch", "sm_80")
    spec = fg.AttentionSpec(64, mask=fg.causal())
    model = fg.lab.io_model(spec, 4096, sram=192 * 1024)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{model}\n\n{fg.lab.memory(spec, 4096)}\n"


def test_the_schedule_is_the_plans(flashgen: Any) -> None:
    words = ("io", "--head-dim", "64", "--tile-q", "64", "--tile-kv", "32", "--heads", "4", "--heads-kv", "2", "--json")
    found = json.loads(flashgen(*words).out)
    assert (found["heads"], found["heads_kv"], found["len_q"]) == (4, 2, 1024)
    assert found["algorithms"][-1]["tile"] == [64, 32]
    assert found["memory"]["peak"] > 0


def test_counted_bytes_stand_beside_the_model(flashgen: Any) -> None:
    words = ("io", "--len", "70", "--head-dim", "64", "--dtype", "fp16", "--causal", "--count")
    found = json.loads(flashgen(*words, "--json").out)
    assert found["count"]["error"] < 0.05
    assert "differ by 0.00 %" in flashgen(*words).out


def test_the_backward_pass_is_an_option(flashgen: Any) -> None:
    found = json.loads(flashgen("io", "--len", "128", "--head-dim", "64", "--backward", "--json").out)
    assert found["pass"] == "backward"
    result = flashgen("io", "--head-dim", "64", "--backward", "--forward-only")
    assert (result.code, result.out) == (2, "")
    assert "leave --forward-only out" in result.err


def test_wrong_values_are_named_by_their_options(flashgen: Any) -> None:
    for words, message in (
        (("--sram", "many"), "--sram 'many' is not a size"),
        (("--heads", "3", "--heads-kv", "2"), "--heads 3 is not a multiple of --heads-kv 2"),
        (("--len", "-1"), "--len-q -1 is out of range"),
    ):
        result = flashgen("io", "--head-dim", "64", *words)
        assert result.code == 2
        assert message in result.err


def test_a_mask_of_tensors_without_values_is_a_usage_error(flashgen: Any) -> None:
    words = ("--mask", "ids[b, q] == ids[b, k]", "--captured", "ids=int32[2]")
    result = flashgen("io", "--head-dim", "64", *words)
    assert result.code == 2
    assert "the tensor ids, which has no value" in result.err
