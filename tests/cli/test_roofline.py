from __future__ import annotations

from typing import Any

import pytest


def test_without_a_gpu_one_sentence_offers_the_emulator(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.lab.bench.on_gpu.find_gpus", lambda: ())
    said = flashgen("roofline", "--head-dims", "64")
    assert (said.code, said.out) == (3, "")
    assert said.err.startswith("error: there is no GPU here to time on; the emulator counts bytes instead: ")
    assert flashgen("roofline", "--lengths", "x").err.startswith("error: --lengths 'x' is no list of numbers")
