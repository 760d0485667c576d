"""``--dtype e4m3`` with build, check, explain and show."""

from __future__ import annotations

import json
from typing import Any

import pytest

WORDS = ("--head-dim", "64", "--dtype", "e4m3", "--forward-only")


def test_it_is_built_for_the_gpus_that_have_it(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", *WORDS, "--scale-block", "64", "--out-dtype", "fp16", "--no-verify", "--json")
    assert result.code == 0, result.err
    made = json.loads(result.out)
    assert [kernel["name"] for kernel in made["kernels"]] == [
        f"{role}_d64_e4m3_to_fp16_scales64_{arch}" for arch in ("sm89", "sm90a") for role in ("forward", "quantize")
    ]
    assert (made["spec"]["dtype"], made["spec"]["out_dtype"], made["spec"]["scale_block"]) == ("e4m3", "fp16", 64)


def test_its_cases_have_scales_and_are_right(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("check", *WORDS, "--causal", "--scale-block", "64", "--arch", "sm_89", "--cases", "6", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["ok"] is True


def test_with_a_cache_it_is_built_for_gpus_without_8_bit_products_too(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", *WORDS, "--decode", "--causal", "--arch", "sm_80", "--json")
    assert result.code == 0, result.err
    made = json.loads(result.out)
    assert made["kernels"][0]["name"] == "decode_d64_e4m3_causal_pages_e4m3_sm80"
    assert flashgen("check", *WORDS, "--decode", "--arch", "sm_90a", "--cases", "6").code == 0


def test_it_is_explained_for_the_first_gpu_that_has_it(flashgen: Any, machine: list[Any]) -> None:
    found = flashgen("explain", *WORDS, "--len-q", "256")
    assert (found.code, found.err) == (0, "")
    assert "FlashAttention-2 for sm_89" in found.out


def test_its_source_multiplies_8_bit_numbers(flashgen: Any, machine: list[Any]) -> None:
    assert "mma.sync.aligned.m16n8k32" in flashgen("show", *WORDS, "--what", "source", "--arch", "sm_120").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arch", "sm_80"), "--dtype e4m3 needs tensor cores of sm_89 or later, and --arch sm_80 has none for it"),
        (("--scale-block", "32"), "--scale-block 32 is not supported; use 64 or 128"),
        (("--out-dtype", "fp32"), "--out-dtype fp32 is unknown; use 'bf16' or 'fp16'"),
        (("--dropout",), "--dropout and --dtype e4m3 do not go together"),
        (("--cache", "paged", "--scale-block", "64"), "--scale-block 64 and --cache paged do not go together"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(flashgen: Any, words: tuple[str, ...], message: str) -> None:
    result = flashgen("build", *WORDS, *words)
    assert result.code == 2
    assert message in " ".join(result.err.split())


def test_it_needs_forward_only(flashgen: Any) -> None:
    result = flashgen("build", "--head-dim", "64", "--dtype", "e4m3", "--arch", "sm_89")
    assert "--dtype e4m3 has no backward pass; use --forward-only" in " ".join(result.err.split())
