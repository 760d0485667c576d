"""Errors in the words of the command line, and of a spec file where that is what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli.option_names import in_options

#: What Python's API calls things.
PYTHON = re.compile(r"[a-z_]+=[^=]|[A-Za-z]+\(|\bNone\b|\bTrue\b|split_|head_dim|tile_|\bkind\b|mask\.")
WRONG = [
    ("--head-dim", "300"),
    ("--head-dim", "64", "--head-dim-v", "0"),
    ("--head-dim", "64", "--dtype", "int8"),
    ("--head-dim", "64", "--dtype", "bf16", "--arch", "sm_75"),
    ("--head-dim", "64", "--window", "-5,0"),
    ("--head-dim", "64", "--window", "1,2,middle"),
    ("--head-dim", "64", "--window", "1"),
    ("--head-dim", "64", "--cache", "paged"),
    ("--head-dim", "64", "--cache", "odd", "--forward-only"),
    ("--head-dim", "64", "--cache", "paged", "--forward-only", "--varlen", "--dropout"),
    ("--head-dim", "64", "--tile-q", "7", "--tile-kv", "7", "--stages", "9"),
    ("--head-dim", "64", "--backward-tile-q", "7", "--backward-warps", "3", "--backward-stages", "9"),
    ("--head-dim", "64", "--warps", "3"),
    ("--head-dim", "64", "--consumers", "5"),
    ("--head-dim", "64", "--warp-partition", "split-z"),
    ("--head-dim", "64", "--warp-partition", "split-k", "--consumers", "2"),
    ("--head-dim", "64", "--warp-partition", "specialized", "--warps", "8"),
    ("--head-dim", "64", "--algorithm", "fa3", "--warps", "4"),
    ("--head-dim", "64", "--algorithm", "fa2", "--consumers", "2"),
    ("--head-dim", "64", "--algorithm", "fa2", "--softmax", "reference-max", "--registers", "24,240"),
    ("--head-dim", "64", "--algorithm", "fa4", "--softmax", "exact"),
    ("--head-dim", "64", "--algorithm", "fa3", "--arch", "sm_80"),
    ("--head-dim", "64", "--registers", "40"),
    ("--head-dim", "64", "--registers", "a"),
    ("--head-dim", "128", "--registers", "240,240", "--arch", "sm_90a"),
    ("--head-dim", "128", "--tile-q", "256", "--tile-kv", "256", "--arch", "sm_90a", "--algorithm", "fa3"),
    ("--head-dim", "256", "--tile-q", "256", "--tile-kv", "256", "--arch", "sm_80"),
    ("--head-dim", "3", "--dtype", "fp16", "--stages", "2", "--arch", "sm_80"),
    ("--head-dim", "64", "--tile-q", "16", "--warps", "16", "--arch", "sm_80"),
    ("--head-dim", "64", "--tile-kv", "16", "--warps", "16", "--warp-partition", "split-k", "--arch", "sm_80"),
    ("--head-dim", "64", "--captured", "x"),
    ("--head-dim", "64", "--captured", "x=1", "--captured", "x=2"),
    ("--head-dim", "64", "--captured", "x=1"),
    ("--head-dim", "64", "--captured", "x=int4[2]"),
    ("--head-dim", "64", "--captured", "for=1"),
    ("--head-dim", "64", "--mask", "q and k"),
    ("--head-dim", "64", "--mask", "q + k"),
    ("--head-dim", "64", "--score", "q > k"),
    ("--head-dim", "64", "--sink", "1.0 * k"),
    ("--head-dim", "64", "--arch", "h100"),
    ("--head-dim", "64", "--arch", "sm_1"),
    (),
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_an_error_of_options_speaks_of_options(flashgen: Any, machine: list[Any], arguments: tuple[str, ...]) -> None:
    result = flashgen("build", "--no-verify", *arguments)
    assert (result.code, result.out) == (2, "")
    # What was typed is quoted as it was, and specs are described as build prints them.
    said = re.sub(r"'[^']*'|\"[^\"]*\"|\bhead_dim \d+", "", result.err)
    said = (
        re.sub(r"--captured \w+=", "", said)
        .replace("cap=30.0", "")
        .replace("ids=int32[2]", "")
        .replace("NAME=VALUE", "")
    )
    assert not PYTHON.search(said), result.err
    assert "--" in result.err


def test_an_error_of_a_spec_file_speaks_of_its_fields(flashgen: Any, machine: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "kernel.toml"
    path.write_text("head_dim = 300\n[schedule]\ntile_q = 7\n")
    result = flashgen("build", "--spec", str(path), "--tile-kv", "9")
    assert f"{path}: head_dim=300 is out of range" in result.err
    assert f"{path}: schedule tile_q=7 is not supported" in result.err
    assert "\n--tile-kv 9 is not supported" in result.err
    path.write_text('head_dim = 64\ndtype = "bf16"\n')
    result = flashgen("build", f"--spec={path}", "--arch", "sm_75")
    assert "dtype='bf16' needs tensor cores of sm_80 or later, and --arch sm_75 has none" in result.err


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("mask.where='q  k' is a number", "--mask 'q  k' is a number"),
        ("tile_q=256, tile_kv=128 and stages=2 need", "--tile-q 256, --tile-kv 128 and --stages 2 need"),
        ("backward warps=3 is", "--backward-warps 3 is"),
        ("s == q and a.head=3 and x_batch=2", "s == q and a.head=3 and x_batch=2"),
    ],
)
def test_words(message: str, words: str) -> None:
    assert in_options(message) == words
