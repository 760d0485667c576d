from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.launch.driver.devices import Gpu


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.lab.bench.on_gpu.find_gpus", lambda: ())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator in place of a GPU."""
    from flashgen.lab.bench.ours import algorithms
    from flashgen.lab.timing.device import HostDevice

    monkeypatch.setattr("flashgen.lab.bench.on_gpu.find_gpus", lambda: (Gpu(0, "A GPU", 80, 2**34),))
    monkeypatch.setattr("flashgen.lab.bench.on_gpu.with_peers", lambda gpu, others: (HostDevice(gpu.name), others))
    monkeypatch.setattr("flashgen.lab.bench.on_gpu.algorithms", lambda names, arch: algorithms(names))


def test_without_a_gpu_one_sentence_offers_the_emulator(flashgen: Any, no_gpu: None) -> None:
    said = flashgen("bench", "--lengths", "4k")
    assert (said.code, said.out) == (3, "")
    assert said.err == (
        "error: there is no GPU here to time on; the emulator counts bytes instead: "
        "flashgen io --head-dim 64 --len 256 --count\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--algorithms", "fa9"), "--algorithms fa9 is unknown; use some of standard,naive"),
        (("--peers", "xformers"), "--peers 'xformers' is unknown"),
        (("--lengths", "long"), "--lengths"),
        (("--head-dims", "0"), "--head-dims"),
        (("--masks", "diagonal"), "--masks"),
        (("--dtype", "int8"), "--dtype 'int8' is unknown"),
        (("--rounds", "0"), "--rounds takes 1 to 1000"),
    ],
)
def test_a_wrong_option_is_named(flashgen: Any, no_gpu: None, options: tuple[str, ...], message: str) -> None:
    said = flashgen("bench", *options)
    assert said.code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_a_peer_that_is_not_installed_is_named(flashgen: Any, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.lab.bench.peers.find_spec", lambda module: None)
    said = flashgen("bench", "--peers", "flash-attn")
    assert said.code == 2
    assert "--peers 'flash-attn' cannot run: torch is not installed; install it, or leave it out" in said.err


def test_missing_matplotlib_is_said_before_anything_is_timed(
    flashgen: Any, emulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = flashgen("bench", "--plots", str(tmp_path))
    assert said.code == 5
    assert said.err == (
        "error: plots need matplotlib, which is not installed; install it by: pip install 'flashgen[lab]'\n"
    )


def test_a_bench_prints_a_table_and_writes_json(flashgen: Any, emulated: None, tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    options = "--algorithms fa2,naive,fa3 --peers numpy --lengths 20 --head-dims 16 --dtype fp16 --masks causal"
    options += " --batch 1 --heads 2 --rounds 1 --milliseconds 1"
    said = flashgen("bench", *options.split(), "--json", str(file))
    assert said.code == 0, said.err
    assert said.out.startswith("A GPU\n\nforward, fp16, D=16, causal\nlength  algorithm  ms")
    assert "best peer" in said.out
    assert [row["algorithm"] for row in json.loads(file.read_text())["rows"]] == ["naive", "fa2", "numpy"]
    page = tmp_path / "page.html"
    said = flashgen("report", "--head-dim", "16", "--causal", "--bench", str(file), "--out", str(page))
    assert said.code == 0, said.err
    assert "numpy" in page.read_text()
