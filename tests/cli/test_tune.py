from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from flashgen import tuned
from flashgen.launch.driver.devices import Gpu
from flashgen.plan.model.tuning import Trial, Tuning
from flashgen.spec import AttentionSpec, Schedule

SPEC = AttentionSpec(64, mask=fg.causal(), direction="forward")
OPTIONS = ("--head-dim", "64", "--causal", "--forward-only")
A100 = Gpu(0, "NVIDIA A100", 80, 2**36)
CHOSEN = Schedule(tile_q=64, tile_kv=64)
TUNING = Tuning(A100.name, (512,), CHOSEN, (Trial("forward", Schedule(), (2.0,)), Trial("forward", CHOSEN, (1.0,))))


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 3, "there is no GPU here to tune on"),
        (("--lengths", "x"), 2, "--lengths 'x' is no list of numbers"),
        (("--budget", "soon"), 2, "--budget 'soon' is not a duration; write one such as 60s or 5m"),
        (("--budget", "0s"), 2, "--budget 0.0 is out of range"),
        (("--tile-q", "64"), 2, "leave out --arch and the options that set a schedule"),
        (("--varlen",), 2, "lengths of its own"),
        (("--score", "s + x[q, k]", "--captured", "x=float32[2]"), 2, "tune from Python: flashgen.tune(spec, q, k, v)"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(
    flashgen: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.setattr("flashgen.cli.commands.lab.tune.find_gpus", lambda: ())
    said = flashgen("tune", *OPTIONS, *options)
    assert said.code == code
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_build_and_show_use_what_was_tuned_and_say_so(flashgen: Any, machine: list[Any], own_cache: Path) -> None:
    machine.append(A100)
    tuned.remember(SPEC, TUNING)
    said = flashgen("build", *OPTIONS, "--no-verify")
    assert said.code == 0, said.err
    assert f"{TUNING.headline} (FLASHGEN_TUNED=0 turns this off)" in said.err
    assert TUNING.headline in said.out
    assert "64x64" in said.out
    assert str(TUNING) in flashgen("show", *OPTIONS).out
    for others in (("--arch", "sm_80"), ("--tile-q", "128")):
        said = flashgen("build", *OPTIONS, "--no-verify", *others)
        assert "tuned on" not in said.out + said.err


def test_the_environment_turns_it_off(
    flashgen: Any, machine: list[Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.append(A100)
    tuned.remember(SPEC, TUNING)
    monkeypatch.setenv("FLASHGEN_TUNED", "0")
    said = flashgen("build", *OPTIONS, "--no-verify")
    assert "tuned on" not in said.out + said.err


def test_what_was_tuned_can_be_forgotten(
    flashgen: Any, machine: list[Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.cli.commands.lab.tune.find_gpus", lambda: (A100,))
    tuned.remember(SPEC, TUNING)
    assert flashgen("tune", *OPTIONS, "--forget").out.startswith("forgotten: head_dim 64")
    assert flashgen("tune", *OPTIONS, "--forget").out.startswith("nothing was tuned: ")
