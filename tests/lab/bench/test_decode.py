"""Steps that generate, timed: the emulator in the GPU's place, and torch on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.lab.bench.case import expected, expected_all
from flashgen.lab.bench.grid import decode_cases
from flashgen.lab.bench.ours import decoders
from flashgen.lab.bench.peers import peers
from flashgen.lab.bench.run import Effort, time_attention
from flashgen.lab.timing.device import HostDevice
from flashgen.launch.driver.devices import Gpu
from flashgen.oracle import forward

SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "heads_kv": 2}


@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("window", [None, 20])
def test_the_reference_is_the_oracle(new_tokens: int, window: int | None) -> None:
    (case,) = decode_cases((70,), (16,), dtype="fp32", new_tokens=new_tokens, window=window, **SIZES)
    x = case.inputs()
    exact = forward(case.spec, x.q, x.k, x.v)[0]
    np.testing.assert_allclose(expected(case, x)[0], exact[-1, :, -1], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(expected_all(case, x)[0], exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_caches_of_both_kinds_are_right(new_tokens: int) -> None:
    cases = decode_cases((70, 150), (16,), dtype="fp16", new_tokens=new_tokens, **SIZES)
    timings = time_attention(cases, (*decoders(), *peers(("numpy",))), HostDevice(), effort=Effort(1, 1.0))
    assert not timings.wrong, str(timings)
    assert [row.algorithm for row in timings.rows] == ["contiguous", "pages of 64"] * 2
    assert "not timed: numpy" in str(timings)
    row = timings.rows[0]
    assert row.gbps == pytest.approx(2 * 2 * 70 * 2 * 16 * 2 / row.timing.ms / 1e6)
    assert "keys  algorithm    ms" in str(timings)
    assert "GB/s" in str(timings)


@pytest.mark.parametrize("cache_dtype", ["e4m3", "e5m2"])
def test_8_bit_caches_hold_the_numbers_that_peers_read(cache_dtype: str) -> None:
    (case,) = decode_cases((70,), (16,), dtype="fp16", cache_dtype=cache_dtype, **SIZES)
    (wide,) = decode_cases((70,), (16,), dtype="fp16", **SIZES)
    assert not np.array_equal(case.inputs().k, wide.inputs().k)
    timings = time_attention((case, wide), decoders(), HostDevice(), effort=Effort(1, 1.0))
    assert not timings.wrong, str(timings)
    assert [row.algorithm for row in timings.rows] == ["contiguous", "pages of 64"] * 2
    assert f"decode, fp16, cache of {cache_dtype}, D=16" in str(timings)
    ours, *_, last = timings.rows
    assert ours.gbps == pytest.approx(2 * 2 * 70 * 2 * 16 / ours.timing.ms / 1e6)
    assert last.gbps == pytest.approx(2 * 2 * 70 * 2 * 16 * 2 / last.timing.ms / 1e6)
    peer = replace(ours, peer=True)
    assert peer.gbps == pytest.approx(2 * ours.gbps)
    assert [row.as_dict()["cache_dtype"] for row in (ours, last)] == [cache_dtype, None]


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_pages_may_have_any_size_and_scales_and_a_window_reads_its_own_keys(new_tokens: int) -> None:
    more: dict[str, Any] = {"page_size": 7, "page_scales": True, "window": 30, "cache_dtype": "e4m3"}
    (case,) = decode_cases((70,), (16,), dtype="fp16", new_tokens=new_tokens, **more, **SIZES)
    timings = time_attention((case,), decoders(page_size=7), HostDevice(), effort=Effort(1, 1.0))
    assert not timings.wrong, str(timings)
    assert [row.algorithm for row in timings.rows] == ["pages of 7"]
    assert "not timed: contiguous" in str(timings)
    assert "scales of pages" in timings.skipped[0].reason
    assert "window 30" in case.title
    (row,) = timings.rows
    assert row.gbps == pytest.approx(2 * 2 * (30 + new_tokens) * 2 * 16 / row.timing.ms / 1e6)
    found = row.as_dict()
    assert (found["page_size"], found["page_scales"], found["window"]) == (7, True, 30)


def test_ragged_caches_are_full_up_to_even_shares() -> None:
    (case,) = decode_cases((70,), (16,), dtype="fp16", new_tokens=3, ragged=True, batch=4, heads=4, heads_kv=2)
    assert case.lengths == (18, 35, 53, 70)
    timings = time_attention((case,), decoders(), HostDevice(), effort=Effort(1, 1.0))
    assert not timings.wrong, str(timings)
    assert "ragged" in case.title
    for row in timings.rows:
        assert row.gbps == pytest.approx(2 * (18 + 35 + 53 + 70) * 2 * 16 * 2 / row.timing.ms / 1e6)
        assert row.as_dict()["ragged"]
    (short,) = decode_cases((3,), (16,), dtype="fp16", new_tokens=2, ragged=True, batch=3, heads=2)
    assert short.lengths == (2, 2, 3)


@pytest.mark.torch
@pytest.mark.parametrize(("new_tokens", "window"), [(1, None), (3, None), (1, 20)])
def test_peers_attend_to_the_same_keys(new_tokens: int, window: int | None) -> None:
    import torch

    device = HostDevice()
    device.put = torch.from_numpy  # type: ignore[method-assign]
    device.get = lambda tensor: tensor.detach().numpy()  # type: ignore[method-assign]
    (case,) = decode_cases((40,), (16,), dtype="fp32", new_tokens=new_tokens, window=window, **SIZES)
    cases = (case, replace(case, ragged=True))
    timings = time_attention(cases, peers(("torch-math",)), device, effort=Effort(1, 1.0))
    assert not timings.wrong, str(timings)
    assert len(timings.rows) == (new_tokens == 1 and window is None)
    assert "it has no lengths of sequences" in timings.skipped[-1].reason
    if window:
        assert "it has no windows" in timings.skipped[0].reason
    elif new_tokens > 1:
        assert "aligned with the first key" in timings.skipped[0].reason


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"new_tokens": 64}, "new_tokens=64"),
        ({"heads_kv": 3}, "heads_kv=3"),
        ({"heads_kv": 0}, "heads_kv=0"),
        ({"new_tokens": 41}, "lengths=40"),
        ({"batch": 0}, "batch=0"),
        ({"cache_dtype": "e3m4"}, "cache_dtype='e3m4'"),
        ({"page_size": 0}, "page_size=0"),
        ({"window": -1}, "window=-1"),
        ({"page_scales": True}, "page_scales=True"),
    ],
)
def test_a_wrong_size_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{named}"):
        decode_cases((40,), (16,), **{**SIZES, **changes})


def test_the_command_prints_gigabytes_per_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    from flashgen.cli.main import main

    monkeypatch.setattr("flashgen.lab.bench.on_gpu.find_gpus", lambda: (Gpu(0, "A GPU", 80, 2**34),))
    monkeypatch.setattr("flashgen.lab.bench.on_gpu.with_peers", lambda gpu, others: (HostDevice(gpu.name), others))
    monkeypatch.setattr("flashgen.lab.bench.on_gpu.decoders", lambda arch, page_size: decoders(None, page_size))
    file = tmp_path / "bench.json"
    options = "bench --decode --new-tokens 2 --peers none --lengths 40 --head-dims 16 --dtype fp16 --batch 1 --heads 2"
    options += " --page-size 9 --window 20"
    monkeypatch.setattr("sys.argv", ["flashgen", *options.split(), "--rounds", "1", "--json", str(file)])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert "decode, fp16, D=16, window 20, 2 new tokens, H=2/1" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["pass"], row["new_tokens"], row["heads_kv"]) for row in rows] == [("decode", 2, 1)] * 2
    assert {row["algorithm"] for row in rows} == {"contiguous", "pages of 9"}
