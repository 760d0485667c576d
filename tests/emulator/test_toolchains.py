"""The same kernel by every compiler, every way of switching stacks and every processor that is at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen.emulator
from flashgen.emulator.toolchain import GCC_KERNEL_FLAGS, KERNEL_FLAGS, RUNTIME_FLAGS, find_toolchain
from flashgen.errors import EmulationError
from flashgen.render.paths import include_dir

RUNTIME = Path(flashgen.emulator.__file__).parent / "runtime"
#: name -> (program, its fixed arguments)
TOOLCHAINS = {
    "g++": ("g++", ""),
    "clang++": ("clang++", ""),
    # The last -O counts, and building the runtime takes half as long without it.
    "g++ with ucontext, without F16C, FMA or AVX": (
        "g++",
        "-DFLASHGEN_EMU_PORTABLE -O0" + " -mno-f16c -mno-fma -mno-avx" * (os.uname().machine == "x86_64"),
    ),
}
PACKAGES = {"g++": "g++", "clang++": "clang"}
# Two warps: copies, a barrier, matrices, a product, shuffles and votes.
BODY = """
const int t = thread_idx(), lane = t % 32, warp = t / 32;
const u32 base = shared_address(shared) + 512 * warp;
cp_async_16(base + 16 * lane, x + 4 * t, 16);
cp_async_commit();
cp_async_wait<0>();
block_sync();
const u32 other = shared_address(shared) + 512 * (1 - warp);
u32 a[4], b[2];
ldmatrix_x4(a, other + 16 * lane);
ldmatrix_x2_trans(b, base + 16 * (lane % 16));
float d[4] = {};
for (int i = 0; i < 3; ++i) mma_m16n8k16_batched(half_t{}, d, a, b);
mma_finish();
d[0] += shuffle_xor(static_cast<float>(lane), 5);
d[1] += warp_any(t == 40) ? 1000.0f : 0.0f;
for (int i = 0; i < 4; ++i) out[4 * t + i] = d[i];
"""


def halves() -> Any:
    return np.random.default_rng(0).integers(-4, 5, (2, 4, 8, 8)).astype(np.float16)


def expected(x: Any) -> Any:
    out = np.zeros((2, 32, 4), np.float32)
    for warp in range(2):
        m = x.astype(np.float32)
        left = np.block([[m[1 - warp, 0], m[1 - warp, 2]], [m[1 - warp, 1], m[1 - warp, 3]]])
        d = 3 * left @ np.vstack([m[warp, 0], m[warp, 1]])
        for lane in range(32):
            row, column = lane // 4, lane % 4 * 2
            out[warp, lane] = (*d[row, column : column + 2], *d[row + 8, column : column + 2])
            out[warp, lane, 0] += lane ^ 5
            out[warp, lane, 1] += 1000 if warp else 0
    return out


@pytest.fixture(scope="module", params=TOOLCHAINS)
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that compiles; the same one for all tests, so that it builds the runtime once."""
    name, options = TOOLCHAINS[request.param]
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed (Debian, Ubuntu: apt install {PACKAGES[name]})")
    if not options:
        # Under the name by which other tests have built the runtime, if it is the same one.
        usual = find_toolchain().path
        return usual if os.path.samefile(usual, program) else program
    wrapper = tmp_path_factory.mktemp("compiler") / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec {program} "$@" {options}\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.fixture
def toolchain(compiler: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A compiler that everything is built with."""
    monkeypatch.setenv("FLASHGEN_CXX", compiler)
    return compiler


@pytest.mark.parametrize("options", [{}, {"schedule": "random", "seed": 3}, {"race": True}], ids=str)
def test_every_toolchain_gives_the_same_numbers(run: Any, toolchain: str, options: dict[str, Any]) -> None:
    x, out = halves(), np.zeros((2, 32, 4), np.float32)
    run(BODY, threads=64, smem=1024, x=x.view(np.uint32).ravel(), out=out, **options)
    np.testing.assert_array_equal(out, expected(x))


@pytest.mark.parametrize(
    ("body", "options", "lines"),
    [
        (
            "if (t == 3) w[5] = 1;\nif (t == 40) w[5] = 2;",
            {"race": True},
            ["race: a store of 4 bytes", "at kernels/test.cu:3", "at kernels/test.cu:2", "thread 40"],
        ),
        (
            "if (t == 3) *reinterpret_cast<Vec16*>(w) = Vec16{};\nif (t == 40) w[1] = 2;",
            {"race": True},
            ["race: a store of 4 bytes", "at kernels/test.cu:3", "at kernels/test.cu:2"],
        ),
        ("\n*reinterpret_cast<volatile float*>(64) = 1.0f;", {}, ["a null pointer", "at kernels/test.cu:3"]),
        ("if (t == 3) return;\nwarp_sync();", {}, ["divergent collective", "returned from the kernel"]),
        ("if (t == 3) return;\nif (t == 4) warp_sync();\nblock_sync();", {}, ["divergent collective"]),
        ("if (t < 32) block_sync();\nblock_sync();", {}, ["divergent barrier"]),
    ],
)
def test_every_toolchain_makes_the_same_findings(
    run: Any, toolchain: str, body: str, options: dict[str, Any], lines: list[str]
) -> None:
    body = f"auto* w = reinterpret_cast<u32*>(shared); const int t = thread_idx();\n{body}"
    with pytest.raises(EmulationError) as caught:
        run(body, threads=64, smem=256, **options)
    assert [line for line in lines if line not in str(caught.value)] == []


def test_cxx_names_the_compiler_if_it_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_CXX", raising=False)
    compiler = shutil.which("g++") or find_toolchain().path
    monkeypatch.setenv("CXX", compiler)
    assert find_toolchain().path == compiler
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert Path(find_toolchain().path).name in ("c++", "g++", "clang++")


DRIVER = """
#include <cstdio>
#include <dlfcn.h>
#include "api.h"

unsigned short x[512];
float out[256];

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return fprintf(stderr, "%s\\n", dlerror()), 2;
  if (fread(x, sizeof x, 1, stdin) != 1) return 3;
  const void* params[2] = {x, out};
  FlashgenEmuBuffer buffers[2] = {{"x", (uint64_t)x, sizeof x, 0}, {"out", (uint64_t)out, sizeof out, 1}};
  FlashgenEmuLaunch launch = {};
  launch.entry = (void (*)(const void*))dlsym(library, "flashgen_emu_entry");
  launch.params = params;
  launch.params_bytes = sizeof params;
  for (int64_t& blocks : launch.grid) blocks = 1;
  launch.threads = 64;
  launch.shared_bytes = 1024;
  launch.schedule = arguments[2][0] - '0';
  launch.seed = 5;
  launch.race = arguments[2][1] - '0';
  launch.resident = launch.cluster = 1;
  launch.buffers = buffers;
  launch.buffer_count = arguments[2][2] - '0';
  static FlashgenEmuReport report;
  if (flashgen_emu_launch(&launch, &report) != 0) return fprintf(stderr, "%s: %s\\n", report.kind, report.what), 1;
  fwrite(out, sizeof out, 1, stdout);
}
"""
KERNEL = """
#include "flashgen/primitives.cuh"
using namespace flashgen;
struct Params {{ const u32* x; float* out; }};
FLASHGEN_KERNEL(64, 1) kernel(FLASHGEN_GRID_CONSTANT Params params) {{
  FLASHGEN_SHARED_MEMORY(shared);
  const u32* x = params.x; float* out = params.out;
  {body}
}}
FLASHGEN_EMU_ENTRY(kernel)
"""


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the runtime, the driver, and the kernel without and with hooks, for aarch64."""
    cross, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    for program, package in ((cross, "g++-aarch64-linux-gnu"), (emulator, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian, Ubuntu: apt install {package})")
    directory = tmp_path_factory.mktemp("aarch64")
    (directory / "driver.cpp").write_text(DRIVER)
    (directory / "kernel.cpp").write_text(KERNEL.format(body=BODY))
    flags = [f for f in find_toolchain().flags if not f.startswith(("-march=", "-mcpu=", "-shared"))]

    def build(*arguments: str) -> None:
        subprocess.run([cross, *flags, f"-I{RUNTIME}", f"-I{include_dir()}", *arguments], check=True, cwd=directory)

    shared = ("-shared", "-Wl,-soname,libruntime.so", "-o", "libruntime.so")
    # The last -O counts; building takes a third of the time so.
    build(*RUNTIME_FLAGS, "-Werror", "-O0", f"{RUNTIME}/runtime.cpp", *shared)
    build("-O1", "driver.cpp", "libruntime.so", "-o", "driver")
    for name, hooks in (("plain", ()), ("race", ("-fsanitize=thread",))):
        build(*KERNEL_FLAGS, *GCC_KERNEL_FLAGS, *hooks, "-c", "kernel.cpp", "-o", f"{name}.o")
        build("-shared", f"{name}.o", "libruntime.so", "-o", f"{name}.so")
    return directory


# Digits: which schedule, whether in race mode, how many of the buffers are declared.
@pytest.mark.parametrize("mode", ["002", "102", "202", "012"])
def test_aarch64_gives_the_same_numbers(aarch64: Path, mode: str) -> None:
    x = halves()
    done = drive(aarch64, mode, x)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32).reshape(2, 32, 4), expected(x))


def test_aarch64_makes_findings(aarch64: Path) -> None:
    done = drive(aarch64, "011", halves())
    assert done.returncode == 1
    assert b"global memory out of bounds: a store touches 4 bytes at" in done.stderr


def drive(directory: Path, mode: str, x: Any) -> subprocess.CompletedProcess[bytes]:
    kernel = f"./{'race' if mode[1] == '1' else 'plain'}.so"
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-E", "LD_LIBRARY_PATH=.", "./driver", kernel, mode]
    return subprocess.run(command, input=x.tobytes(), capture_output=True, cwd=directory, check=False, timeout=300)
