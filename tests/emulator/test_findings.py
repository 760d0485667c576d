"""What a faulty kernel does becomes an EmulationError; the process and later launches are unharmed."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import EmulatedKernel
from flashgen.errors import CompileError, EmulationError, LaunchError
from flashgen.render import Origin


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    return str(caught.value)


def test_barriers_at_two_places_are_a_finding(run: Any) -> None:
    text = finding(run, "if (thread_idx() < 32) {\n  block_sync();\n} else {\n  block_sync();\n}", threads=64)
    assert text.startswith("divergent barrier: this thread is at block_sync while 32 threads")
    assert "kernels/test.cu:4" in text
    assert "(test.cu:2)" in text


def test_a_deadlock_names_each_group_of_waiting_threads(run: Any) -> None:
    text = finding(run, "if (thread_idx() != 95) {\n  warp_sync();\n}\nblock_sync();", threads=96)
    assert text.startswith("deadlock: no thread can run:")
    assert "block 0:" in text
    assert "65 threads (warps 0 1 2) wait at block_sync at test.cu:4 (65 of 96 threads have arrived)" in text
    assert "31 threads (warps 2) wait at warp_sync at test.cu:2 (31 of its warp's 32 lanes have arrived)" in text


def test_lanes_at_different_collectives_are_a_finding(run: Any) -> None:
    text = finding(run, "if (thread_idx() < 20) {\n  warp_sync();\n} else {\n  warp_any(true);\n}")
    assert text.startswith("divergent collective: this lane is at warp_any while 20 other lanes")
    assert "warp_sync (test.cu:2)" in text
    assert "lane 20" in text


def test_the_same_collective_at_two_places_is_a_finding(run: Any) -> None:
    text = finding(run, "if (thread_idx() < 20) {\n  warp_sync();\n} else {\n  warp_sync();\n}")
    assert "kernels/test.cu:4" in text


@pytest.mark.parametrize("early", ["thread_idx() == 0", "thread_idx() == 31"])
def test_a_collective_after_a_lane_returned_is_a_finding(run: Any, early: str) -> None:
    text = finding(run, f"if ({early}) return;\nwarp_sync();")
    assert text.startswith("divergent collective")
    assert "returned from the kernel" in text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("\n*reinterpret_cast<volatile float*>(64) = 1.0f;", "a store to address 0x40, a null pointer"),
        ("\nout[0] = *reinterpret_cast<volatile float*>(64);", "a load from address 0x40, a null pointer"),
        ("\nshared[8192 + thread_idx()] = 1;", "shared memory out of bounds: a store to offset"),
        ("\nout[0] = shared[thread_idx() - 65536];", "shared memory out of bounds"),
        ("\nshared[0x7fffffff] = 1;", "shared memory out of bounds: a store to offset 2147483647"),
        ("\nshared[-0x7fffffff] = 1;", "shared memory out of bounds: a store to offset -2147483647"),
        ("\nu32 r[4]; ldmatrix_x4(r, shared_address(shared) + 8);", "misaligned: ldmatrix needs"),
        (
            "\nu32 r[4]; ldmatrix_x4(r, shared_address(shared) + 64);",
            "out of bounds: ldmatrix touches 16 bytes at",
        ),
        ("\nshared_address(out);", "which is not in the block's shared memory"),
        ("volatile int zero = 0;\nout[0] = 7 / zero;", "division by zero"),
    ],
)
def test_a_stray_access_is_a_finding_at_its_line(run: Any, body: str, message: str) -> None:
    text = finding(run, body, smem=64, out=np.zeros(1, np.float32))
    assert message in text
    assert "at kernels/test.cu:2" in text
    assert "by block 0, warp 0, lane" in text


def test_endless_recursion_is_a_stack_overflow(run: Any) -> None:
    prelude = (
        "struct R { static __attribute__((noinline)) int f(volatile int* x) {"
        " int y[64]; y[0] = *x; return f(y) + y[0]; } };"
    )
    text = finding(run, "int zero = 0; out[0] = R::f(&zero);", prelude=prelude, out=np.zeros(1, np.float32))
    assert text.startswith("stack overflow")


def test_a_frame_larger_than_a_page_does_not_leap_over_the_end_of_the_stack(run: Any) -> None:
    prelude = (
        "struct R { static __attribute__((noinline)) int f(volatile int* x, int depth) {"
        " volatile int y[9000]; y[0] = *x; return depth ? f(y, depth - 1) + y[0] : y[0]; } };"
    )
    out = np.zeros(1, np.float32)
    run("int zero = 0; out[0] = R::f(&zero, 2);", prelude=prelude, out=out)
    text = finding(run, "int zero = 0; out[0] = R::f(&zero, 3);", prelude=prelude, out=out)
    assert text.startswith("stack overflow")


def test_the_chain_of_calls_leads_from_the_helper_to_the_kernel(run: Any) -> None:
    prelude = (
        '#include "flashgen/primitives.cuh"\n#line 7 "flashgen/helper.cuh"\n'
        "FLASHGEN_DEVICE void helper(const float* x, flashgen::u32 a) { flashgen::cp_async_4(a, x, 4); }"
    )
    text = finding(run, "\nhelper(x + 1, shared_address(shared));", smem=16, prelude=prelude, x=np.zeros(1, np.float32))
    assert "  at flashgen/helper.cuh:7\n  called from kernels/test.cu:2\n" in text


def test_a_finding_names_the_schedule_and_seed_that_repeat_it(run: Any) -> None:
    text = finding(run, "if (thread_idx() != 0) warp_sync();", schedule="random", seed=41)
    assert "schedule='random', seed=41" in text


def test_the_runtime_works_after_findings_and_from_other_threads(run: Any) -> None:
    for _ in range(3):
        finding(run, "\n*reinterpret_cast<volatile float*>(64) = 1.0f;")
        out = np.zeros(64, np.int32)
        worker = threading.Thread(
            target=lambda out=out: run("block_sync(); out[thread_idx()] = 1;", threads=64, out=out)
        )
        worker.start()
        worker.join()
        assert out.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 33}, "threads=33"),
        ({"threads": 2048}, "threads=2048"),
        ({"smem": 2**20}, "smem_bytes=1048576"),
    ],
)
def test_an_impossible_launch_is_refused(run: Any, options: dict[str, int], message: str) -> None:
    assert message in finding(run, "block_sync();", **options)


def test_an_unknown_schedule_is_a_launch_error(run: Any) -> None:
    with pytest.raises(LaunchError, match="schedule='eager'"):
        run("block_sync();", schedule="eager")


def test_a_program_can_read_what_a_finding_says(run: Any) -> None:
    with pytest.raises(EmulationError) as caught:
        run(
            "\nif (block_idx_x() == 1 && thread_idx() == 37) *reinterpret_cast<volatile float*>(64) = 1.0f;",
            threads=64,
            blocks=2,
            schedule="random",
            seed=41,
            race=True,
            resident=1,
        )
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.kind, error.kernel) == ("global memory out of bounds", "kernel_under_test")
        assert (error.file, error.line) == ("kernels/test.cu", 2)
        assert (error.block, error.warp, error.lane) == ((1, 0, 0), 1, 5)
        assert (error.schedule, error.seed, error.race, error.resident) == ("random", 41, True, 1)
        assert str(error) == str(caught.value)


def test_a_block_is_named_by_its_place_in_the_grid(run: Any) -> None:
    body = "\nif (block_idx_y() == 1 && block_idx_z() == 2) *reinterpret_cast<volatile float*>(64) = 1.0f;"
    with pytest.raises(EmulationError, match=r"by block \(2, 1, 2\)") as caught:
        run(body, blocks=(3, 2, 3), schedule="reverse")
    assert caught.value.block == (2, 1, 2)


def test_what_a_finding_cannot_know_is_none(run: Any) -> None:
    with pytest.raises(EmulationError) as caught:
        run("block_sync();", threads=33)
    error = caught.value
    assert error.kind
    assert (error.file, error.line, error.block, error.warp, error.lane) == (None,) * 5
    assert EmulationError("no page").kind is None


def test_the_place_is_the_innermost_call(run: Any) -> None:
    prelude = (
        '#include "flashgen/primitives.cuh"\n#line 7 "flashgen/helper.cuh"\n'
        "FLASHGEN_DEVICE void helper(const float* x, flashgen::u32 a) { flashgen::cp_async_4(a, x, 4); }"
    )
    with pytest.raises(EmulationError) as caught:
        run("\nhelper(x + 1, shared_address(shared));", smem=16, prelude=prelude, x=np.zeros(1, np.float32))
    assert (caught.value.file, caught.value.line) == ("flashgen/helper.cuh", 7)


STRAY = """\
// Its comment,
// of two lines.
#include "flashgen/primitives.cuh"
struct Params { int* out; };
FLASHGEN_KERNEL(32, 1) stray(FLASHGEN_GRID_CONSTANT Params p) {
  if (flashgen::thread_idx() == 3) flashgen::warp_sync();
  flashgen::warp_any(true);
}
"""


def test_a_finding_names_the_line_of_a_text_with_the_comment_at_its_top() -> None:
    with pytest.raises(EmulationError) as caught:
        EmulatedKernel("stray", STRAY).launch(1, bytes(8), threads=32)
    assert (caught.value.file, caught.value.line) == ("stray.cu", 6)
    assert "warp_any (stray.cu:7)" in str(caught.value)


def test_a_finding_names_the_template_line_that_a_table_gives() -> None:
    table = [Origin("kernels/stray.cu.j2", 10 * number) for number, _ in enumerate(STRAY.splitlines(), start=1)]
    for above in ("", "// Another line.\n"):
        kernel = EmulatedKernel(
            "stray", above + STRAY, line_table=lambda above=above: [Origin("", 0)] * bool(above) + table
        )
        with pytest.raises(EmulationError) as caught:
            kernel.launch(1, bytes(8), threads=32)
        assert (caught.value.file, caught.value.line) == ("kernels/stray.cu.j2", 60)
        assert "(kernels/stray.cu.j2:70)" in str(caught.value)


def test_an_error_of_the_host_compiler_names_the_template_line() -> None:
    table = [Origin("kernels/stray.cu.j2", 10 * number) for number, _ in enumerate(STRAY.splitlines(), start=1)]
    with pytest.raises(CompileError, match=r"kernels/stray\.cu\.j2:70:.*error"):
        EmulatedKernel("stray", STRAY.replace("warp_any", "warp_all"), line_table=lambda: table)
