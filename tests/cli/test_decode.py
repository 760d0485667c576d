"""``--decode``: commands about steps of few new tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg

SPEC = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal(), direction="forward", cache="paged")
WORDS = ("--head-dim", "64", "--dtype", "fp16", "--causal", "--decode", "--arch", "sm_80")


def test_a_paged_cache_and_a_token_are_what_is_left_out(flashgen: Any) -> None:
    result = flashgen("explain", *WORDS)
    assert (result.code, result.err) == (0, "")
    assert result.out == str(fg.explain(SPEC, 1, 4096, width=240, arch="sm_80", decode=True)) + "\n"
    for line in (
        "kernel  Flash-Decoding for sm_80",
        "reads   at most 1048576 bytes of keys and values of a sequence, for each key/value head",
        "split   64 tiles of keys: up to 33 blocks share them if so many run at once, and the last one merges",
    ):
        assert line in result.out.splitlines()
    found = json.loads(flashgen("explain", *WORDS, "--len-q", "20", "--len-kv", "100", "--window", "9,0", "--json").out)
    assert (found["len_q"], found["len_kv"], found["forward_kernel"]["role"]) == (20, 100, "decode")
    assert (found["kv_bytes"], found["kv_tiles"], found["most_blocks"]) == (36 * 256, 1, 1)


def test_8_bit_keys_take_half_the_bytes(flashgen: Any) -> None:
    line = "reads   at most 524288 bytes of keys and values of a sequence, for each key/value head"
    for more in ((), ("--page-scales",)):
        words = (*WORDS, "--cache-dtype", "e4m3", *more)
        assert line in flashgen("explain", *words).out.splitlines()
        checked = json.loads(flashgen("check", *words, "--cases", "4", "--json").out)
        assert checked["ok"]


def test_a_window_reads_its_own_keys(flashgen: Any) -> None:
    found = json.loads(flashgen("explain", *WORDS, "--window", "100,0", "--json").out)
    assert found["kv_bytes"] == 2 * 64 * 256


def test_bytes_are_those_of_the_model(flashgen: Any) -> None:
    call = ("--batch", "2", "--heads", "8", "--heads-kv", "2", "--multiprocessors", "10")
    result = flashgen("io", *WORDS, *call)
    model = fg.lab.io_model(SPEC, 1, 4096, batch=2, heads=8, heads_kv=2, multiprocessors=10)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{model}\n"
    found = json.loads(flashgen("io", *WORDS, "--len-kv", "500", "--count", "--json").out)
    assert found["count"]["error"] < 0.06
    assert [kernel["kernel"] for kernel in found["count"]["counted"]["kernels"]] == ["decode"]


def test_a_build_is_verified_on_steps_that_generate(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.launch.call.prepared import Call

    roles: set[str] = set()
    run = Call.run

    def noted(self: Call, *arguments: Any) -> Any:
        roles.update(step.kernel.plan.role for step in self.steps)
        return run(self, *arguments)

    monkeypatch.setattr(Call, "run", noted)
    found = json.loads(flashgen("build", *WORDS, "--json").out)
    assert found["verify"]["ok"]
    assert "decode_d64_fp16_causal_pages_sm80" in [kernel["name"] for kernel in found["kernels"]]
    assert "decode" in roles


def test_drawn_cases_have_few_tokens(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.cli.commands import checking

    tokens: list[int] = []
    draw = checking.draw_decode

    def noted(*given: Any) -> Any:
        case = draw(*given)
        tokens.append(case.len_q)
        return case

    monkeypatch.setattr(checking, "draw_decode", noted)
    result = flashgen("check", *WORDS, "--cases", "24", "--json")
    assert json.loads(result.out)["ok"]
    assert len(tokens) == 24
    assert max(tokens) <= 16


def test_drawn_cases_also_ask_for_results_that_do_not_depend_on_the_batch() -> None:
    from flashgen.verify import Tiles, draw_decode

    cases = [draw_decode(SPEC, Tiles(), 0, index) for index in range(40)]
    fillings = [case.filling_for(SPEC) for case in cases]
    assert {filling.batch_invariant for filling in fillings} == {False, True}
    assert all(filling.splits == 0 for filling in fillings if filling.batch_invariant)


@pytest.mark.parametrize("command", ["build", "check", "explain", "io"])
def test_specs_without_a_decode_kernel_are_refused(flashgen: Any, command: str) -> None:
    result = flashgen(command, "--head-dim", "64", "--dtype", "fp32", "--decode", "--arch", "sm_80")
    assert (result.code, result.out) == (2, "")
    assert "--decode: there is no decode kernel for head_dim 64, fp32, full, forward only, paged cache" in result.err


def test_a_spec_file_needs_a_cache(flashgen: Any, tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('head_dim = 64\ndirection = "forward"\n')
    result = flashgen("explain", "--spec", str(file), "--decode")
    assert result.code == 2
    assert "--decode needs a cache; write cache = 'paged' into" in result.err
    file.write_text('head_dim = 64\ndirection = "forward"\ncache = "contiguous"\n')
    assert "Flash-Decoding" in flashgen("explain", "--spec", str(file), "--decode", "--arch", "sm_80").out


def test_a_mask_alone_has_no_decode_kernel() -> None:
    for spec in (fg.causal(), fg.AttentionSpec(64)):
        with pytest.raises(fg.ArgumentError, match="decode=True needs a spec that has a decode kernel"):
            fg.explain(spec, decode=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--decode", "--backward"), "--decode does not go with --backward and --algorithms"),
        (("--decode", "--algorithms", "fa2"), "--decode does not go with --backward and --algorithms"),
        (("--new-tokens", "2"), "--new-tokens is for --decode; add it, or leave it out"),
        (("--cache-dtype", "e4m3"), "--cache-dtype is for --decode; add it, or leave it out"),
        (("--page-size", "16"), "--page-size is for --decode"),
        (("--window", "16"), "--window is for --decode"),
        (("--ragged",), "--ragged is for --decode"),
        (("--decode", "--page-scales"), "--page-scales needs an 8-bit cache"),
        (("--decode", "--page-size", "0"), "--page-size 0 is out of range"),
        (("--decode", "--cache-dtype", "e3m4"), "--cache-dtype 'e3m4' is unknown"),
        (("--decode", "--cache-dtype", "e4m3", "--dtype", "fp32"), "needs queries of 16 or 8 bits"),
        (("--decode", "--new-tokens", "0"), "--new-tokens 0 is out of range"),
        (("--decode", "--heads-kv", "5"), "--heads-kv 5 does not divide the number of heads"),
    ],
)
def test_a_bench_of_steps_names_wrong_options(flashgen: Any, options: tuple[str, ...], message: str) -> None:
    result = flashgen("bench", *options)
    assert result.code == 2
    assert message in result.err
