from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BUILD = ("build", "--head-dim", "64", "--forward-only", "--arch", "sm_80", "--no-verify")


def entries(root: Path) -> list[Path]:
    return sorted((root / "entries").glob("*.entry"))


def test_list_shows_kernels_and_only_kernels(flashgen: Any, machine: list[Any], own_cache: Path) -> None:
    flashgen(*BUILD)
    flashgen(*BUILD, "--causal")
    listed = json.loads(flashgen("list", "--json").out)
    assert listed["schema"] == 1
    assert {kernel["name"] for kernel in listed["kernels"]} == {"forward_d64_sm80", "forward_d64_causal_sm80"}
    assert all(kernel["registers"] == 40 and kernel["arch"] == "sm_80" for kernel in listed["kernels"])
    rows = flashgen("list").out.splitlines()
    assert rows[0].split()[:3] == ["name", "arch", "registers"]
    assert len(rows) == 3


def test_list_passes_over_entries_that_are_damaged(flashgen: Any, machine: list[Any], own_cache: Path) -> None:
    flashgen(*BUILD)
    for path in entries(own_cache):
        path.write_bytes(b"flashgen" + bytes(20))
    result = flashgen("list", "--json")
    assert result.code == 0
    assert json.loads(result.out)["kernels"] == []


def test_an_empty_cache_is_said_on_stderr(flashgen: Any, own_cache: Path) -> None:
    result = flashgen("list")
    assert (result.code, result.out) == (0, "")
    assert str(own_cache) in result.err
    assert not own_cache.exists()


def test_info_counts_entries(flashgen: Any, machine: list[Any], own_cache: Path) -> None:
    flashgen(*BUILD)
    info = json.loads(flashgen("cache", "info", "--json").out)
    assert info["root"] == str(own_cache)
    assert info["entries"] == len(entries(own_cache)) > 0
    assert info["kinds"] == {"cubin": 1, "sources": 1}
    assert f"entries    {info['entries']} (1 cubins, 1 rendered sources)" in flashgen("cache", "info").out


def test_verify_finds_a_flipped_bit_and_ends_with_1(flashgen: Any, machine: list[Any], own_cache: Path) -> None:
    flashgen(*BUILD)
    assert flashgen("cache", "verify").code == 0
    victim = entries(own_cache)[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    result = flashgen("cache", "verify")
    assert result.code == 1
    assert "1 bad" in result.out
    assert victim.name in result.err


def test_clear_removes_entries_and_builds_and_nothing_else(flashgen: Any, machine: list[Any], own_cache: Path) -> None:
    flashgen(*BUILD)
    (own_cache / "mine.txt").write_text("keep")
    count = len(entries(own_cache))
    assert flashgen("cache", "clear").out == f"{count} entries removed from {own_cache}\n"
    assert entries(own_cache) == []
    assert not (own_cache / "builds").exists()
    assert (own_cache / "mine.txt").read_text() == "keep"
    assert json.loads(flashgen("list", "--json").out)["kernels"] == []


def test_clear_does_not_follow_a_link_out_of_the_cache(flashgen: Any, own_cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("keep")
    own_cache.mkdir(mode=0o700)
    (own_cache / "builds").symlink_to(elsewhere)
    flashgen("cache", "clear")
    assert (elsewhere / "file").exists()


def test_a_cache_that_others_can_write_to_ends_with_5_and_a_remedy(
    flashgen: Any, machine: list[Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    monkeypatch.delenv("FLASHGEN_CACHE_SHARED", raising=False)
    result = flashgen(*BUILD)
    assert result.code == 5
    assert "chmod go-w" in result.err
