"""The table of tuned schedules: who is believed, and what builds make of it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from flashgen import pipeline, tuned
from flashgen.arch import get_arch
from flashgen.errors import CacheError
from flashgen.plan import plan
from flashgen.plan.fallbacks import for_alignment
from flashgen.plan.model.tuning import Trial, Tuning
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, WarpPartition

SPEC = AttentionSpec(64, dtype="fp16", mask=fg.causal())
CHOSEN = Schedule(
    tile_q=64, tile_kv=64, stages=1, warps=WarpPartition("split_q", 4), algorithm="fa2", backward=BackwardSchedule(64)
)
GPU = "NVIDIA A100"
TUNING = Tuning(
    GPU, (512, 4096), CHOSEN, (Trial("forward", Schedule(), (2.0, 8.0)), Trial("forward", CHOSEN, (1.0, 4.0)))
)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    monkeypatch.delenv("FLASHGEN_TUNED", raising=False)
    monkeypatch.setattr("flashgen.compile.compiler_build_id", lambda: "CL-1; pretended")
    return root / "tuned"


def name() -> str:
    return GPU


def afresh() -> None:
    """As a new process finds the table."""
    tuned._tables.clear()


def entries(table: Path) -> list[Path]:
    return sorted((table / "entries").iterdir())


def test_what_is_remembered_is_recalled_whole_by_the_next_process() -> None:
    assert tuned.recall(SPEC, name) is None
    assert tuned.remember(SPEC, TUNING)
    afresh()
    assert tuned.recall(SPEC, name) == TUNING


def test_the_forward_pass_alone_has_the_same_schedule() -> None:
    tuned.remember(SPEC, TUNING)
    found = tuned.recall(AttentionSpec(64, dtype="fp16", mask=fg.causal(), direction="forward"), name)
    assert found == TUNING


def test_another_spec_gpu_compiler_or_code_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.remember(SPEC, TUNING)
    for other in (AttentionSpec(64, dtype="bf16", mask=fg.causal()), AttentionSpec(64, dtype="fp16")):
        assert tuned.recall(other, name) is None
    assert tuned.recall(SPEC, lambda: "NVIDIA H200") is None
    with monkeypatch.context() as changed:
        changed.setattr("flashgen.compile.compiler_build_id", lambda: "CL-2; pretended")
        assert tuned.recall(SPEC, name) is None
    with monkeypatch.context() as changed:
        changed.setattr("flashgen.tuned.rendering_digest", lambda: "edited")
        assert tuned.recall(SPEC, name) is None
    assert tuned.recall(SPEC, name) == TUNING


def test_widths_have_entries_of_their_own() -> None:
    wide, narrow = (AttentionSpec(64, mask=fg.sliding_window(n)) for n in (512, 64))
    tuned.remember(wide, TUNING)
    assert tuned.recall(narrow, name) is None


def test_without_a_table_nobody_is_asked_for_the_gpus_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> str:
        raise AssertionError

    assert tuned.recall(SPEC, never) is None
    tuned.remember(SPEC, TUNING)
    monkeypatch.setenv("FLASHGEN_TUNED", "0")
    assert tuned.recall(SPEC, never) is None


def test_a_damaged_entry_counts_as_missing_and_is_moved_aside(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned.remember(SPEC, TUNING)
    for path in entries(table):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    afresh()
    with caplog.at_level(logging.WARNING, "flashgen"):
        assert tuned.recall(SPEC, name) is None
    assert "its checksum does not match" in caplog.text
    assert "counts as missing" in caplog.text
    assert len(entries(table)) == 1
    assert len(list((table / "bad").iterdir())) == 1


def test_an_entry_of_another_layout_or_with_a_wrong_schedule_counts_as_missing(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "_LAYOUT", 2)
    tuned.remember(SPEC, TUNING)
    monkeypatch.setattr(tuned, "_LAYOUT", 1)
    assert tuned.recall(SPEC, name) is None
    for text in (b"[]", b"{}", b"not JSON", b'{"layout": 1, "tuning": {"gpu": 3}}'):
        assert tuned._decoded(text) is None
    value = json.loads(tuned_image(table))
    value["layout"] = 1
    value["tuning"]["schedule"]["tile_q"] = 17
    assert tuned._decoded(json.dumps(value).encode()) is None


def tuned_image(table: Path) -> bytes:
    data = entries(table)[0].read_bytes()
    return data[data.rindex(b'{"layout"') :]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_an_entry_that_others_can_write_is_refused(table: Path) -> None:
    tuned.remember(SPEC, TUNING)
    for path in entries(table):
        path.chmod(0o666)
    afresh()
    with pytest.raises(CacheError, match="mode 0666"):
        tuned.recall(SPEC, name)


def test_what_is_forgotten_is_gone_and_the_kernel_cache_keeps_the_table(table: Path) -> None:
    tuned.remember(SPEC, TUNING)
    fg.cache.default_cache().clear()
    assert len(entries(table)) == 2
    assert tuned.forget(SPEC, GPU)
    assert entries(table) == []
    assert not tuned.forget(SPEC, GPU)
    assert tuned.recall(SPEC, name) is None


class Recorder(pipeline.Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def tuned(self, message: str) -> None:
        self.said.append(message)


def planned(schedule: Schedule | None = None, *, gpu: Any = name) -> tuple[Any, list[str]]:
    observer = Recorder()
    (found,) = pipeline.plans(SPEC, schedule, [get_arch("sm_80")], observer, gpu=gpu)
    return found, observer.said


def test_a_plan_for_the_gpu_uses_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.remember(SPEC, TUNING)
    found, said = planned()
    assert found == plan(SPEC, CHOSEN, "sm_80")
    assert said == [TUNING.headline]
    assert str(found).endswith(str(TUNING))
    assert "tuned on NVIDIA A100 for lengths 512, 4096: fa2, tile_q=64" in str(found)
    # What was tried, the fastest first.
    lines = str(TUNING).splitlines()
    assert "2.00x" in lines[2]
    assert lines[3].split()[1] == "default"
    # A schedule of the caller's, a named architecture, and FLASHGEN_TUNED=0 turn it off.
    for other, says in (planned(Schedule(tile_q=64)), planned(gpu=None)):
        assert (other.tuning, says) == (None, [])
    monkeypatch.setenv("FLASHGEN_TUNED", "0")
    assert planned()[0] == plan(SPEC, None, "sm_80")


def test_the_plan_stays_a_function_of_spec_schedule_and_architecture() -> None:
    before = plan(SPEC, None, "sm_80")
    tuned.remember(SPEC, TUNING)
    assert plan(SPEC, None, "sm_80") == before
    assert before.tuning is None


def test_less_aligned_arguments_take_the_plans_own_schedule() -> None:
    tuned.remember(SPEC, TUNING)
    found, _ = planned()
    assert for_alignment(found, 2) == plan(SPEC, None, "sm_80", access_bytes=2)


def test_the_kernels_sources_do_not_depend_on_the_trials() -> None:
    tuned.remember(SPEC, TUNING)
    found, _ = planned()
    assert pipeline.sources(found) == pipeline.sources(plan(SPEC, CHOSEN, "sm_80"))


def test_a_build_for_the_current_gpu_looks_into_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen import api

    asked: list[Any] = []

    def plans(spec: Any, schedule: Any, archs: Any, *, gpu: Any = None) -> Any:
        asked.append(None if gpu is None else gpu())
        return pipeline.plans(spec, schedule, archs, gpu=gpu)

    class Driver:
        def capability(self, device: int) -> int:
            return 80

        def device_name(self, device: int) -> str:
            return GPU

    monkeypatch.setattr(api, "plans", plans)
    monkeypatch.setattr(api, "variant", lambda attention, target: pipeline.variant(attention, "emulator"))
    monkeypatch.setattr("flashgen.launch.driver.cuda.get_driver", Driver)
    monkeypatch.setattr("flashgen.launch.driver.cuda.current_device", lambda: 0)
    api.forget(SPEC)
    before = fg.build(SPEC)
    assert before.plan.tuning is None
    tuned.remember(SPEC, TUNING)
    assert fg.build(SPEC) is before
    api.forget(SPEC)
    assert fg.build(SPEC).plan.tuning == TUNING
    assert api.built(SPEC, "sm_80", 0) is fg.build(SPEC)
    assert fg.build(SPEC, arch="sm_80").plan.tuning is None
    assert asked == [GPU, GPU, None]
    api._kernels.forget(lambda key: key[0] == SPEC)
