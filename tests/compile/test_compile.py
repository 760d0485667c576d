from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flashgen.arch import ARCHS, get_arch
from flashgen.compile import (
    compile_ptx,
    compile_source,
    disassemble,
    options_for,
)
from flashgen.errors import CompileError, SpecError
from flashgen.render import KernelSource
from flashgen.render.paths import include_dir
from tests.compile.machine_code import disassembled

Source = Callable[..., KernelSource]
TOP = """\
{% import "kernels/common.j2" as common %}
#include "flashgen/primitives.cuh"
using namespace flashgen;
"""
COPY = TOP + "{{ common.kernel(plan) }}(float* p) {\n  p[thread_idx()] = p[block_idx_x()];\n}\n"

#: Every function of the ptx headers, by what an architecture must have for it.
EVERYWHERE = """
  const u32 address = shared_address(shared);
  u32 r4[4], r2[2];
  ldmatrix_x4(r4, address);
  ldmatrix_x4_trans(r4, address);
  ldmatrix_x2(r2, address);
  ldmatrix_x2_trans(r2, address);
  u32 r1[1];
  ldmatrix_x1(r1, address);
  ldmatrix_x1_trans(r1, address);
  float d[4] = {};
  mma_m16n8k8(half_t{}, d, r4[0], r4[1], r2[0]);
  mma_m16n8k8_batched(half_t{}, d, r4[2], r4[3], r2[1]);
  mma_finish();
  block_sync();
  warp_sync();
  if (block_any(d[0] > 0) && warp_any(d[1] > 0)) d[2] += shuffle_xor(d[0], 1) + shuffle(d[1], 0);
  d[3] += shuffle(thread_idx(), 3) + float_of(bits_of(d[2]) + 1) + maximum(d[0], d[1]);
  d[3] += fused_multiply_add_clipped(d[0], d[1], d[2]);
  d[3] += reciprocal_approx(d[2]) + lowest_bit(warp_ballot(d[1] < 1));
  d[3] += half_to_float(to_half_bits(fused_multiply_add(d[0], exp2_approx(d[1]), log2_approx(d[2]))));
  reduce_add(out + thread_idx() + block_idx_x() + block_idx_y() + opaque(block_idx_z()) + grid_dim_x(), d[3]);
"""
AMPERE = """
  cp_async_16(address, out, 16);
  cp_async_8(address, out, 8);
  cp_async_4(address, out, 4);
  cp_async_commit();
  cp_async_wait<0>();
  mma_m16n8k16(half_t{}, d, r4, r2);
  mma_m16n8k16(bfloat16_t{}, d, r4, r2);
  mma_m16n8k16_batched(half_t{}, d, r4, r2);
  i32 counts[4] = {};
  mma_m16n8k128_bits(counts, r2, r4[0]);
  d[2] += counts[3];
  d[3] = maximum_magnitude(d[3], d[2]);
  mma_m16n8k16_batched(bfloat16_t{}, d, r4, r2);
  mma_finish();
  out[1] = float_of(pack(bfloat16_t{}, d[0], d[1]));
  r4[1] = multiply_halves(select_bytes(r4[1], 0, 0x1404), r4[2]);
"""
ADA = """
  u32 halves[2];
  halves_of(e4m3_t{}, r4[0], halves[0], halves[1]);
  r4[0] = halves[0] ^ halves[1];
  mma_m16n8k32(e4m3_t{}, d, r4, r2);
  mma_m16n8k32_batched(e4m3_t{}, d, r4, r2);
  mma_m16n8k32(e5m2_t{}, d, r4, r2);
  r4[1] = pack_four(e4m3_t{}, d[0], d[1], d[2], d[3]);
"""
HOPPER = """
  reduce_add_x4(out, d);
  stmatrix_x4(address, r4);
  stmatrix_x4_trans(address, r4);
  stmatrix_x2(address, r2);
  stmatrix_x2_trans(address, r2);
  stmatrix_x1(address, r1);
  stmatrix_x1_trans(address, r1);
  const u32 other = map_to_rank(address, cluster_size() - 1 - cluster_rank());
  cluster_arrive();
  cluster_wait();
  cluster_load_x4(r4, other);
  cluster_store_x4(other, r4);
  cluster_store(other, cluster_load(other) + 1);
  cluster_arrive_relaxed();
  cluster_wait();
  griddep_launch_dependents();
  griddep_wait();
"""
#: Of every architecture too, but in a header of its own.
GRID = """
  auto* counter = reinterpret_cast<u32*>(out);
  expect_cooperative_launch();
  store_release(counter, atomic_add_release(counter, 1) + load_acquire(counter + 1) + atomic_add(counter, 2u));
  atomic_or(counter, 1u << 31);
  out[3] += atomic_inc_acq_rel(counter + 4, 7u);
  out[2] += atomic_add(reinterpret_cast<i32*>(out), -1) + atomic_add(out, 1.0f);
"""
WARPGROUP = """
  float accumulators[32] = {};
  const MatrixDescriptor operand = matrix_descriptor(address, 16, 1024, Swizzle::bytes_128);
  setmaxnreg_dec<152>();
  setmaxnreg_inc<240>();
  wgmma_pin(accumulators);
  const u32 rounded[1][4] = { {r4[0], r4[1], r4[2], r4[3]} };
  wgmma_compute_before_wait(rounded, accumulators[0], 0);
  wgmma_fence();
  wgmma_ss<half_t, 64>(accumulators, operand, operand.advanced(32), thread_idx() < 0);
  wgmma_rs<bfloat16_t, 64, Major::mn>(accumulators, r4, operand, true);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(accumulators);
  wgmma_fence();
  wgmma_ss_first<e4m3_t, 64>(accumulators, operand, operand);
  wgmma_rs_first<e5m2_t, 64>(accumulators, r4, operand);
  const MatrixDescriptor operands[4] = {operand, operand.advanced(32), operand.advanced(64), operand.advanced(96)};
  const u32 registers[4][4] = { {r4[0]}, {r4[1]}, {r4[2]}, {r4[3]} };
  wgmma_ss_first_four<half_t, 64>(accumulators, operands, operands);
  wgmma_ss_four<half_t, 64>(accumulators, operands, operands);
  wgmma_rs_first_four<e4m3_t, 64>(accumulators, registers, operands);
  wgmma_rs_four<bfloat16_t, 64>(accumulators, registers, operands, thread_idx() < 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(accumulators);
  out[thread_idx()] = accumulators[3] + float_of(multiply_packed(bfloat16_t{}, r4[0], minimum_packed(r4[1], r4[2])));
  out[1] += float_of(not_finite_packed(bfloat16_t{}, r4[3]) | not_finite_packed(half_t{}, r2[0]));
"""


def test_the_trivial_kernel_below_uses_every_primitive() -> None:
    # The functions of these two are called one by one in test_async_copies.py.
    elsewhere = ("barrier.cuh", "bulk.cuh")
    paths = sorted((include_dir() / "flashgen" / "ptx").glob("*.cuh"))
    headers = "".join(path.read_text() for path in paths if path.name not in elsewhere)
    names = set(re.findall(r"^FLASHGEN_DEVICE \w+ (\w+)\(", headers, re.MULTILINE))
    used = set(re.findall(r"(\w+)(?:<[\w:, ]+>)?\(", EVERYWHERE + AMPERE + ADA + HOPPER + GRID + WARPGROUP))
    assert len(names) > 20
    assert names <= used


@pytest.mark.parametrize("name", ARCHS)
def test_every_architecture_compiles_every_primitive_it_has(source: Source, name: str) -> None:
    arch = get_arch(name)
    body = EVERYWHERE + GRID + (AMPERE if arch.has_cp_async else "") + (ADA if arch.capability >= 89 else "")
    body += (HOPPER if arch.has_vector_reduction else "") + (WARPGROUP if name == "sm_90a" else "")
    text = (
        TOP.replace("primitives", "primitives_sm90").replace(
            "#include",
            '#define WGMMA_SHAPES(shape) shape(64)\n#include "flashgen/primitives_packed.cuh"\n'
            '#include "flashgen/primitives_eight_bits.cuh"\n#include',
            1,
        )
        + "{{ common.kernel(plan) }}(float* out) {\n  FLASHGEN_SHARED_MEMORY(shared);\n"
        + body
        + "}\n"
    )
    binary = compile_source(source(text, arch=arch))
    assert (binary.name, binary.arch) == ("tiny", name)
    assert binary.image.startswith(b"\x7fELF")
    assert 0 < binary.resources.registers <= arch.max_registers_per_thread
    assert binary.compile_seconds > 0


def test_the_same_source_gives_the_same_cubin(source: Source) -> None:
    first, second = (compile_source(source(COPY)) for _ in range(2))
    assert first.image == second.image
    assert (first.resources, first.log) == (second.resources, second.log)


def test_options_name_the_whole_architecture_and_leave_precision_alone() -> None:
    options = options_for("sm_90a")
    assert options[0] == "--gpu-architecture=sm_90a"
    assert options != options_for("sm_90")
    assert not any("fast" in option for option in options)


def test_ptx_is_text_for_the_architecture(source: Source) -> None:
    ptx = compile_ptx(source(COPY))
    assert ".target sm_80" in ptx
    assert ".entry tiny(" in ptx


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_DUMP_DIR", str(tmp_path / "dump" / "new"))
    return tmp_path / "dump" / "new"


def test_everything_compiled_is_dumped(source: Source, dump: Path) -> None:
    kernel = source(COPY)
    binary = compile_source(kernel)
    dumped = {path.name: path.read_bytes() for path in dump.iterdir()}
    assert sorted(dumped) == ["tiny.cu", "tiny.cubin", "tiny.ptx"]
    assert dumped["tiny.cu"].decode() == kernel.text
    assert dumped["tiny.cubin"] == binary.image
    assert b".entry tiny(" in dumped["tiny.ptx"]


def test_a_source_that_fails_is_dumped_too(source: Source, dump: Path) -> None:
    with pytest.raises(CompileError):
        compile_source(source("int v = wrong;\n"))
    assert [path.name for path in dump.iterdir()] == ["tiny.cu"]


def test_a_dump_directory_that_cannot_be_made_is_named(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_DUMP_DIR", str(tmp_path / "file" / "dump"))
    with pytest.raises(SpecError, match=r"FLASHGEN_DUMP_DIR=.* cannot be written"):
        compile_source(source(COPY))


def test_sass_shows_the_instructions(source: Source) -> None:
    sass = disassembled(compile_source(source(COPY)).image)
    assert "LDG" in sass
    assert "STG" in sass
    assert "EXIT" in sass


def test_an_image_that_no_disassembler_reads_has_no_sass() -> None:
    assert disassemble(b"not a cubin") is None
