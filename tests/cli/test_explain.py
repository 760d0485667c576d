"""``flashgen explain``."""

from __future__ import annotations

import json
from typing import Any

import flashgen as fg
from flashgen.cli.gpu.arrays import Gpu


def test_the_map_is_drawn_on_stdout(flashgen: Any) -> None:
    result = flashgen("explain", "--head-dim", "64", "--causal", "--len-q", "512", "--arch", "sm_80")
    assert (result.code, result.err) == (0, "")
    assert result.out == str(fg.explain(fg.AttentionSpec(64, mask=fg.causal()), 512, width=240, arch="sm_80")) + "\n"


def test_options_of_the_schedule_are_its_tiles(flashgen: Any) -> None:
    words = ("--tile-q", "64", "--tile-kv", "32", "--len-q", "100", "--len-kv", "200", "--json")
    result = flashgen("explain", "--head-dim", "64", "--window", "20,0", "--score", "s * 2", *words)
    found = json.loads(result.out)
    assert (found["tile_q"], found["tile_kv"], found["len_q"], found["len_kv"]) == (64, 32, 100, 200)
    assert found["score"] == "s * 2.0"
    assert found["tiles"] == found["empty"] + found["partial"] + found["full"] == 14


def test_the_algorithm_is_shown_with_the_reason(flashgen: Any) -> None:
    words = ("explain", "--head-dim", "84", "--len-q", "256", "--arch", "sm_90a")
    assert "not FlashAttention-3: TMA needs rows of a multiple of 16 bytes" in flashgen(*words).out
    found = json.loads(flashgen(*words, "--json").out)
    assert found["algorithm"] == "FlashAttention-2"
    assert found["why_not_fa3"].startswith("TMA needs rows of a multiple of 16 bytes")
    newest = json.loads(flashgen("explain", "--head-dim", "128", "--len-q", "256", "--arch", "sm_90a", "--json").out)
    assert (newest["algorithm"], newest["why_not_fa3"]) == ("FlashAttention-3", None)


def test_tensors_that_a_command_line_cannot_have_are_drawn(flashgen: Any) -> None:
    words = ("--mask", "(q >= k) & (ids[b, q] == ids[b, k])", "--captured", "ids=int32[2]", "--len-q", "1000", "--json")
    result = flashgen("explain", "--head-dim", "64", *words)
    assert "values drawn at random, integers in ascending order: ids" in result.err
    found = json.loads(result.out)
    assert found["empty"] > found["tiles"] / 2
    assert flashgen("explain", "--head-dim", "64", *words).out == result.out


def test_a_wrong_mask_is_a_usage_error(flashgen: Any) -> None:
    result = flashgen("explain", "--head-dim", "64", "--mask", "q and k")
    assert (result.code, result.out) == (2, "")
    assert "--mask: in " in result.err


def test_the_gpu_that_is_found_is_explained_as_build_builds_for_it(flashgen: Any, machine: list[Any]) -> None:
    words = ("explain", "--head-dim", "128", "--len-q", "256", "--json")
    assert json.loads(flashgen(*words).out)["arch"] == "sm_80"
    machine.append(Gpu(0, "A GPU", 90, 2**34))
    found = json.loads(flashgen(*words).out)
    assert (found["arch"], found["algorithm"]) == ("sm_90a", "FlashAttention-3")
    assert json.loads(flashgen(*words, "--arch", "sm_86").out)["arch"] == "sm_86"


def test_a_map_that_is_too_large_is_a_usage_error(flashgen: Any) -> None:
    result = flashgen("explain", "--head-dim", "64", "--len-q", "1000000000", "--arch", "sm_80")
    assert (result.code, result.out) == (2, "")
    assert "give a shorter --len-q or --len-kv" in result.err
    result = flashgen("explain", "--head-dim", "64", "--len-kv", "-1", "--arch", "sm_80")
    assert (result.code, result.out) == (2, "")
    assert "--len-q -1 is out of range" in result.err
