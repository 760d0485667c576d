from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.cache import default_cache
from flashgen.emulator.build import Library, kernel_library, runtime_library
from flashgen.emulator.kernel import Buffer, EmulatedKernel
from flashgen.emulator.toolchain import find_toolchain
from flashgen.errors import CacheError, CompileError, LaunchError
from flashgen.render.paths import include_dir

TEXT = """#include "flashgen/primitives.cuh"
struct Params { int* out; int value; };
#line 40 "kernels/thing.cu.j2"
FLASHGEN_KERNEL(32, 1) thing(FLASHGEN_GRID_CONSTANT Params p) {
  if (flashgen::thread_idx() == 0) *p.out = p.value + STEP;
}
"""


def text(step: int) -> str:
    return TEXT.replace("STEP", str(step))


def result_of(kernel: EmulatedKernel) -> int:
    """What the kernel makes of 5."""
    out = np.zeros(1, np.int32)
    kernel.launch(1, struct.pack("Qi4x", out.ctypes.data, 5), [Buffer("out", out.ctypes.data, 4, True)])
    return int(out[0])


def test_a_kernel_is_built_once_per_text(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = kernel_library("thing", text(1)), kernel_library("thing", text(2))
    assert other.key != first.key
    default_cache()._memory.clear()
    monkeypatch.setattr("flashgen.emulator.build._build_kernel", lambda *parts: pytest.fail("built again"))
    assert kernel_library("thing", text(1)) == first


def test_a_kernel_is_built_anew_when_a_header_that_it_reads_has_changed(tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(include_dir(), tmp_path / "include")
    monkeypatch.setattr("flashgen.emulator.build.include_dir", lambda: tmp_path / "include")
    header = tmp_path / "include" / "flashgen" / "step.cuh"
    by_way = header.with_name("way.cuh")
    by_way.write_text('#pragma once\n  #include "flashgen/step.cuh"\n')
    out, results = np.zeros(1, np.int32), []
    for step in (3, 6):
        header.write_text(f"#pragma once\nconstexpr int kStep = {step};\n")
        kernel = EmulatedKernel("thing", '#include "flashgen/way.cuh"\n' + TEXT.replace("STEP", "kStep"), threads=32)
        kernel.launch(1, struct.pack("Qi4x", out.ctypes.data, 5), [Buffer("out", out.ctypes.data, 4, True)])
        results.append(int(out[0]))
    assert results == [8, 11]


def test_a_kernel_is_built_once_whatever_it_is_called() -> None:
    renamed = text(4).replace("thing", "something")
    assert kernel_library("something", renamed) == kernel_library("thing", text(4))
    # What only looks like the name is part of the text.
    assert kernel_library("thing", text(4).replace("value", "things")) != kernel_library("thing", text(4))
    out = np.zeros(1, np.int32)
    for kernel in (EmulatedKernel("thing", text(4), threads=32), EmulatedKernel("something", renamed, threads=32)):
        kernel.launch(1, struct.pack("Qi4x", out.ctypes.data, 5), [Buffer("out", out.ctypes.data, 4, True)])
        assert out[0] == 9
        out[0] = 0


def test_two_kernels_of_one_name_live_side_by_side() -> None:
    kernels = [EmulatedKernel("thing", text(step), threads=32) for step in (10, 20)]
    out = np.zeros(1, np.int32)
    seen = []
    for kernel in kernels:
        kernel.launch(1, struct.pack("Qi4x", out.ctypes.data, 5), [Buffer("out", out.ctypes.data, 4, True)])
        seen.append(int(out[0]))
    assert seen == [15, 25]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Names of the kernels that are built from now on, and whether for race mode."""
    found = []

    def noted(name: str, code: str, *, race: bool) -> Library:
        found.append((name, race))
        return kernel_library(name, code, race=race)

    monkeypatch.setattr("flashgen.emulator.kernel.kernel_library", noted)
    return found


@pytest.mark.parametrize("race", [False, True, None])
def test_only_what_runs_first_is_built_at_once(race: bool | None, built: list[tuple[str, bool]]) -> None:
    kernel = EmulatedKernel("thing", text(1), threads=32, race=race)
    assert built == ([] if race is None else [("thing", race)])
    out = np.zeros(1, np.int32)
    for watched in (bool(race), not race, bool(race)):
        out[0] = 0
        buffers = [Buffer("out", out.ctypes.data, 4, True)]
        kernel.launch(1, struct.pack("Qi4x", out.ctypes.data, 5), buffers, race=watched)
        assert out[0] == 6
    assert built == [("thing", bool(race)), ("thing", not race)]


def test_a_call_builds_what_it_launches(built: list[tuple[str, bool]]) -> None:
    kernel = fg.build(fg.AttentionSpec(16, dtype="fp16"), arch="sm_80", target="emulator")
    x = np.ones((1, 5, 1, 16), np.float16)
    kernel.target.options = {"race": True}
    out, lse = kernel(x, x, x)
    forward, *others = kernel.plan.kernels
    assert built == [(forward.name, True)]
    kernel.target.options = {}
    kernel.backward(x, x, x, x, out, lse)
    assert sorted(built[1:]) == sorted((other.name, False) for other in others)


def test_params_of_another_size_are_refused() -> None:
    kernel = EmulatedKernel("thing", text(1), threads=32)
    with pytest.raises(LaunchError, match="params has 8 bytes, but the parameter struct of thing has 16"):
        kernel.launch(1, b"12345678")


def test_a_compile_error_shows_the_template_line() -> None:
    with pytest.raises(CompileError) as caught:
        kernel_library("thing", text(1).replace("p.value", "p.values"))
    assert "kernels/thing.cu.j2:41" in caught.value.log
    assert "kernel thing" in str(caught.value)


def test_an_undefined_function_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="missing_thing"):
        kernel_library("thing", "void missing_thing();\n" + text(1).replace("*p.out", "missing_thing(), *p.out"))


def test_a_missing_compiler_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("FLASHGEN_CXX", raising=False)
    with pytest.raises(CompileError, match=r"apt install g\+\+"):
        runtime_library()


def test_a_wrong_compiler_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="FLASHGEN_CXX='no-such-compiler'"):
        runtime_library()


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("as_named", ["./compiler", "compiler"])
def test_a_compiler_may_be_named_relative_to_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_named: str
) -> None:
    script(tmp_path / "compiler", f'#!/bin/sh\nexec {find_toolchain().path} "$@"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    monkeypatch.setenv("FLASHGEN_CXX", as_named)
    (tmp_path / "text.cpp").write_text("int x;\n")
    find_toolchain().run([str(tmp_path / "text.cpp")], tmp_path / "library.so", "a text")
    assert (tmp_path / "library.so").read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("neither a program nor a script", "does not run"),
        ("#!/no/such/interpreter\n", "does not run"),
        ("#!/bin/sh\nexit 3\n", "does not run"),
        ("#!/bin/sh\necho version 1\n", "wrote no output for"),
    ],
)
def test_a_compiler_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, problem: str
) -> None:
    compiler = script(tmp_path / "compiler", text)
    monkeypatch.setenv("FLASHGEN_CXX", compiler)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(CompileError, match=f"{compiler}.* {problem}.*FLASHGEN_CXX"):
        runtime_library()


def test_nothing_is_loaded_from_a_directory_that_others_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    with pytest.raises(CacheError, match="0777"):
        runtime_library()


def test_a_cache_that_cannot_be_made_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # The runtime takes longest to build, and always the same way.
    image = runtime_library().binary.image
    monkeypatch.setattr("flashgen.emulator.build._build_runtime", lambda *parts: parts[-1].write_bytes(image))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert result_of(EmulatedKernel("thing", text(3), threads=32)) == 8
