"""The text of wgmma instructions: every width of every type, and what must not compile."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from flashgen.arch import get_arch
from flashgen.compile import compile_ptx, compile_source
from flashgen.errors import CompileError
from flashgen.render import KernelSource

Source = Callable[..., KernelSource]
TOP = """\
{% import "kernels/common.j2" as common %}
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;
"""
EVERY_WIDTH = """
template <class T, i32 n>
FLASHGEN_DEVICE void products(float* out, const u32 (&a)[4], MatrixDescriptor x) {
  float d[n / 2];
  wgmma_fence();
  wgmma_ss_first<T, n>(d, x, x);
  wgmma_rs<T, n>(d, a, x, true);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
#pragma unroll
  for (i32 i = 0; i < n / 2; ++i) out[i] = d[i];
  if constexpr (n < 256) products<T, n + 8>(out, a, x);
}
"""
KERNEL = """{{ common.kernel(plan) }}(float* out, const u32* in) {
  const u32 a[4] = {in[0], in[1], in[2], in[3]};
  const MatrixDescriptor x = matrix_descriptor(in[4], in[5], in[6], Swizzle::bytes_64);
  BODY
}
"""


def kernel(source: Source, body: str, before: str = "") -> KernelSource:
    return source(TOP + before + KERNEL.replace("BODY", body), arch=get_arch("sm_90a"))


#: A developer's run takes one type of each size, DRAWN_CASES=ci all.
ELEMENTS = [
    ("half_t", "k16.f32.f16.f16"),
    ("e4m3_t", "k32.f32.e4m3.e4m3"),
    ("bfloat16_t", "k16.f32.bf16.bf16"),
    ("e5m2_t", "k32.f32.e5m2.e5m2"),
]
IS_SAMPLE = os.environ.get("DRAWN_CASES", "sample") == "sample"


@pytest.mark.parametrize(("element", "name"), ELEMENTS[: 2 if IS_SAMPLE else None])
def test_every_width_names_each_of_its_accumulators_once(source: Source, element: str, name: str) -> None:
    ptx = compile_ptx(kernel(source, f"products<{element}, 8>(out, a, x);", EVERY_WIDTH))
    operation = rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+){re.escape(name)}"
    form = re.compile(operation + r" \{([^}]*)\}, (\{[^}]*\}|%rd\d+), %rd\d+, p")
    found = [(int(n), d.split(", "), a) for n, d, a in form.findall(ptx)]
    assert [n for n, *_ in found] == [n for n in range(8, 257, 8) for _ in range(2)]
    for (n, d, a), in_registers in zip(found, [False, True] * 32, strict=True):
        assert len(set(d)) == len(d) == n // 2
        assert len(a.strip("{}").split(", ")) == (4 if in_registers else 1)


#: As a kernel names the shapes that it uses.
SHAPES = "#define WGMMA_SHAPES(shape) shape(8) shape(256)\n"
FOUR = "const MatrixDescriptor four[4] = {x, x.advanced(32), x.advanced(64), x.advanced(96)};"


@pytest.mark.parametrize("n", [8, 256])
@pytest.mark.parametrize(
    ("product", "in_registers"),
    [
        ("wgmma_ss_four<half_t, N>(d, four, four);", False),
        ("wgmma_ss_first_four<half_t, N>(d, four, four);", False),
        ("wgmma_rs_four<half_t, N, Major::mn>(d, {{a[0]}, {a[1]}, {a[2]}, {a[3]}}, four, in[7] != 0);", True),
    ],
)
def test_four_products_are_one_statement_with_the_same_accumulators(
    source: Source, product: str, in_registers: bool, n: int
) -> None:
    product = product.replace("N", str(n), 1).replace("{{", "{ {").replace("}}", "} }")
    body = f"float d[{n // 2}] = {{}}; {FOUR} {product}\nfor (i32 i = 0; i < {n // 2}; ++i) out[i] = d[i];"
    ptx = compile_ptx(source(SHAPES + TOP + KERNEL.replace("BODY", body), arch=get_arch("sm_90a")))
    statement = ptx[ptx.index(".reg .pred p;") :]
    found = re.findall(r"wgmma\.mma_async\S+ (\{[^}]*\}), (\{[^}]*\}|%rd\d+), (%rd\d+), p", statement)
    assert len(found) == 4
    assert len({d for d, *_ in found}) == 1
    assert len(set(found[0][0].strip("{}").split(", "))) == n // 2
    assert all(a.startswith("{") == in_registers for _, a, _ in found)
    assert len({b for *_, b in found}) == 4
    # The first one may drop what the accumulators held, no other does.
    assert [line.split()[0] for line in statement.splitlines() if "setp" in line or "wgmma.mma" in line][:3] == [
        "setp.ne.b32",
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16",
        "setp.eq.b32",
    ]


@pytest.mark.parametrize(
    "majors", ["Major::k, Major::k", "Major::k, Major::mn", "Major::mn, Major::k", "Major::mn, Major::mn"]
)
def test_majors_are_the_last_two_numbers(source: Source, majors: str) -> None:
    body = f"float d[4] = {{}}; wgmma_ss<half_t, 8, {majors}>(d, x, x, true); out[0] = d[0];"
    numbers = ",".join("1" if "mn" in major else "0" for major in majors.split(", "))
    assert f", p,1,1,{numbers};" in compile_ptx(kernel(source, body))


@pytest.mark.parametrize(
    ("product", "message"),
    [
        ("wgmma_ss<e4m3_t, 8, Major::k, Major::mn>(d, x, x, true)", "8-bit operands of wgmma must be K-major"),
        ("wgmma_rs<e5m2_t, 8, Major::mn>(d, a, x, true)", "8-bit operands of wgmma must be K-major"),
        ("wgmma_ss<half_t, 12>(d, x, x, true)", "wgmma has 8 to 256 columns, in steps of 8"),
        (
            "const MatrixDescriptor four[4] = {x, x, x, x}; wgmma_ss_four<half_t, 8>(d, four, four)",
            "a kernel says which shapes it uses",
        ),
    ],
)
def test_forms_that_do_not_exist_do_not_compile(source: Source, product: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_ptx(kernel(source, f"float d[{6 if '12' in product else 4}] = {{}}; {product}; out[0] = d[0];"))
    assert message in str(caught.value)


def test_the_assembler_has_nothing_to_say_about_a_clean_product(source: Source) -> None:
    body = """float d[64];
    wgmma_fence();
    wgmma_ss_first<bfloat16_t, 128>(d, x, x.advanced(64));
    #pragma unroll
    for (i32 k = 1; k < 4; ++k) wgmma_ss<bfloat16_t, 128>(d, x.advanced(32 * k), x, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(d);
    #pragma unroll
    for (i32 i = 0; i < 64; ++i) out[64 * thread_idx() + i] = d[i];"""
    binary = compile_source(kernel(source, body))
    assert "C75" not in binary.log
    assert binary.resources.spill_bytes == 0
