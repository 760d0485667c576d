"""How kernels are made for the first time: what happens at the same time, and what else may go wrong by it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
import flashgen.compile as compiling
from flashgen import pipeline, sources
from flashgen.cache import ahead
from flashgen.compile import Binary, Resources, build_id, compiler_build_id, nvrtc
from flashgen.errors import CompileError
from flashgen.launch.variant import Variant
from flashgen.plan import plan
from flashgen.render import KernelSource, render

SPEC = fg.AttentionSpec(16, dtype="fp16", direction="forward")
NAME = "forward_d16_fp16_sm80"
#: Longer than anything here takes: where it runs out, a test fails.
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHGEN_OVERRIDE_DIR", raising=False)
    compiler_build_id.cache_clear()
    yield
    compiler_build_id.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were compiled, which is pretended."""
    names: list[str] = []

    def compile_source(source: KernelSource) -> Binary:
        names.append(source.name)
        return Binary(source.name, "sm_80", b"cubin", Resources(0, 0, 0, 0), 0.1, "")

    monkeypatch.setattr("flashgen.compile.compile_source", compile_source)
    return names


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that were started."""
    threads: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return threads


def make(target: pipeline.TargetName = "gpu", spec: fg.AttentionSpec = SPEC) -> Variant:
    return pipeline.variant(plan(spec, None, "sm_80"), target)


def test_the_compiler_is_asked_which_it_is_while_texts_are_rendered(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    asked, rendered = threading.Event(), threading.Event()

    def ask() -> str:
        asked.set()
        assert rendered.wait(PATIENCE)
        return "CL-1"

    def render_when_asked(plan: Any) -> KernelSource:
        assert asked.wait(PATIENCE)
        rendered.set()
        return render(plan)

    monkeypatch.setattr(build_id, "_ask", ask)
    monkeypatch.setattr(sources, "render", render_when_asked)
    make()
    assert compiled == [NAME]
    assert compiler_build_id() == "CL-1"


def test_a_text_is_rendered_once_and_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    rendered: list[str] = []

    def counted(plan: Any) -> KernelSource:
        rendered.append(plan.name)
        return render(plan)

    monkeypatch.setattr(sources, "render", counted)
    monkeypatch.setattr("flashgen.render.render", counted)
    make()
    assert rendered == compiled == [NAME]


def test_a_compiler_that_is_known_is_neither_loaded_nor_asked(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], started: list[threading.Thread]
) -> None:
    compiler_build_id()
    compiler_build_id.cache_clear()
    monkeypatch.setattr(nvrtc, "_bindings", lambda: pytest.fail("the compiler was loaded"))
    make()
    assert len(compiled) == 1
    assert started == []


def test_builds_for_the_emulator_load_no_compiler_and_start_no_thread(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread]
) -> None:
    monkeypatch.setattr(nvrtc, "_bindings", lambda: pytest.fail("the compiler was loaded"))
    assert set(make("emulator").kernels) == {"forward"}
    assert started == []


def test_a_compiler_that_is_missing_is_reported_where_its_answer_is_needed(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread]
) -> None:
    nvrtc._bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError) as expected:
        compiler_build_id()
    with pytest.raises(CompileError) as error:
        make()
    assert "NVRTC, the CUDA compiler library, was not found; install it with" in str(error.value)
    assert str(error.value) == str(expected.value)
    # After rendering: the text is in the cache, for when there is a compiler.
    monkeypatch.setattr(sources, "render", lambda plan: pytest.fail("rendered again"))
    assert set(sources.sources_of(plan(SPEC, None, "sm_80"))) == {"forward"}
    assert started == []


def test_what_goes_wrong_in_the_thread_is_raised_where_the_answer_is_needed(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], started: list[threading.Thread]
) -> None:
    askers: list[threading.Thread] = []

    def refuse() -> str:
        askers.append(threading.current_thread())
        raise CompileError("NVRTC did not start")

    monkeypatch.setattr(build_id, "_ask", refuse)
    with pytest.raises(CompileError, match="NVRTC did not start"):
        make()
    assert askers == [*started, threading.current_thread()]
    assert compiled == []


def test_a_mistake_in_a_template_comes_first_and_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread]
) -> None:
    def refuse_at_length() -> str:
        time.sleep(0.2)
        raise CompileError("NVRTC did not start")

    def mistaken(plan: Any) -> KernelSource:
        raise CompileError("kernels/forward.cu.j2:1: a mistake")

    monkeypatch.setattr(build_id, "_ask", refuse_at_length)
    monkeypatch.setattr(sources, "render", mistaken)
    with pytest.raises(CompileError, match="a mistake"):
        make()
    assert [thread.is_alive() for thread in started] == [False]


def test_where_no_thread_can_be_had_the_compiler_is_asked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    make()
    assert len(compiled) == 1
    assert compiler_build_id.cache_info().currsize == 1


BOTH = fg.AttentionSpec(16, dtype="fp16")
PARTS = ("prepare", "main", "finish")
BOTH_NAMES = [f"{role}_d16_fp16_sm80" for role in ("forward", *(f"backward_{part}" for part in PARTS))]


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_processors", lambda: 2)


@pytest.mark.usefixtures("two_processors")
def test_kernels_are_compiled_two_at_a_time_and_each_once(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    pretended = compiling.compile_source
    first_two = threading.Barrier(2)

    def compile_together(source: KernelSource) -> Binary:
        if source.name in (BOTH_NAMES[0], BOTH_NAMES[-1]):
            first_two.wait(PATIENCE)
        return pretended(source)

    monkeypatch.setattr("flashgen.compile.compile_source", compile_together)
    assert list(make(spec=BOTH).kernels) == ["forward", *PARTS]
    assert sorted(compiled) == sorted(BOTH_NAMES)


def test_on_one_processor_kernels_are_compiled_in_their_order(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], started: list[threading.Thread]
) -> None:
    compiler_build_id()
    monkeypatch.setattr(ahead, "_processors", lambda: 1)
    make(spec=BOTH)
    assert compiled == BOTH_NAMES
    assert started == []


@pytest.mark.usefixtures("two_processors")
def test_where_all_is_in_the_cache_no_thread_is_started(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], started: list[threading.Thread]
) -> None:
    make(spec=BOTH)
    assert len(compiled) == 4
    started.clear()
    make(spec=BOTH)
    assert len(compiled) == 4
    assert started == []


@pytest.mark.usefixtures("two_processors")
@pytest.mark.parametrize("wrong", BOTH_NAMES)
def test_a_kernel_that_does_not_compile_is_reported_whoever_compiled_it_and_no_thread_is_left(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], started: list[threading.Thread], wrong: str
) -> None:
    pretended = compiling.compile_source

    def refuse_one(source: KernelSource) -> Binary:
        if source.name == wrong:
            raise CompileError(f"{wrong} does not compile")
        return pretended(source)

    monkeypatch.setattr("flashgen.compile.compile_source", refuse_one)
    with pytest.raises(CompileError, match=f"{wrong} does not compile"):
        make(spec=BOTH)
    assert not any(thread.is_alive() for thread in started)
    assert wrong not in compiled


@pytest.mark.usefixtures("two_processors")
def test_where_no_thread_can_be_had_kernels_are_compiled_one_after_another(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    make(spec=BOTH)
    assert compiled == BOTH_NAMES
