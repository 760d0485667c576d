from __future__ import annotations

from collections.abc import Callable

import pytest

from flashgen.arch import get_arch
from flashgen.compile import compile_ptx, compile_source
from flashgen.compile.registers import require_registers
from flashgen.emulator import load
from flashgen.errors import CompileError, EmulationError, SerialisedError
from flashgen.plan.model.plans import Constant
from flashgen.render import KernelSource, templates_dir

Source = Callable[..., KernelSource]
TOP = """\
{% import "kernels/common.j2" as common %}
#include "flashgen/primitives.cuh"
using namespace flashgen;
"""
CONFIG = "struct Config {\n  i32 tile_q;\n  i32 stages;\n};\n"


def failure(source: KernelSource) -> str:
    with pytest.raises(CompileError) as error:
        compile_source(source)
    return str(error.value)


def test_an_error_names_and_quotes_the_template_line(source: Source) -> None:
    kernel = """\
{% if true %}
{{ common.kernel(plan) }}(float* p) {
  p[0] = {{ plan.threads }} + undefined_name;
}
{% endif %}
"""
    message = failure(source(TOP + kernel))
    assert message.startswith("tiny does not compile for sm_80: 1 error\n")
    assert 'kernels/tiny.cu.j2:6: error: identifier "undefined_name" is undefined' in message
    assert "6 |   p[0] = {{ plan.threads }} + undefined_name;" in message
    assert "p[0] = 128 + undefined_name;" in message


def test_an_error_in_a_row_of_a_table_names_the_macro_that_prints_it(source: Source) -> None:
    broken = (Constant("tile_q", 64), Constant("stages", 2), Constant("no_member", 1))
    message = failure(source(TOP + CONFIG + "{{ common.config(plan) }}\nint after = wrong;\n", config=broken))
    macros = (templates_dir() / "kernels" / "common.j2").read_text().split("\n")
    row = macros.index(next(line for line in macros if "{{ member.name }} = {{ member.value }}" in line)) + 1
    assert f"kernels/common.j2:{row}: error" in message
    assert "kernels/tiny.cu.j2:9: error" in message


def test_every_error_inside_a_loop_names_the_same_template_line(source: Source) -> None:
    loop = "{% for n in range(3) %}\nint v{{ n }} = wrong{{ n }};\n{% endfor %}\nint last = bad;\n"
    message = failure(source(loop))
    assert message.count("kernels/tiny.cu.j2:2: error") == 3
    assert message.count("kernels/tiny.cu.j2:4: error") == 1
    assert message.split("\n")[0].endswith("4 errors")


def test_an_error_in_a_header_names_the_header(source: Source) -> None:
    text = TOP + "struct No {};\n{{ common.kernel(plan) }}() { cp_async_wait<No>(); }\n"
    assert "kernels/tiny.cu.j2:5: error" in failure(source(text))
    # No instruction packs two of them.
    text = (
        '#include "flashgen/element.cuh"\n'
        + TOP
        + "{{ common.kernel(plan) }}(Pair<i64>* p) { *p = Pair<i64>::from(1, 1); }\n"
    )
    message = failure(source(text))
    header = (templates_dir() / "include/flashgen/element.cuh").read_text().split("\n")
    line = next(n for n, line in enumerate(header, start=1) if "static Pair from" in line)
    assert f"flashgen/element.cuh:{line}: error" in message
    assert f"{line} | {header[line - 1]}" in message


def test_a_failed_static_assert_prints_its_sentence_and_the_config(source: Source) -> None:
    shape = """\
template <Config cfg>
struct Shape {
  static_assert(cfg.tile_q % 128 == 0, "tile_q must be a multiple of 128");
};
{{ common.config(plan) }}
{{ common.kernel(plan) }}() { Shape<kConfig> shape; }
"""
    message = failure(source(TOP + CONFIG + shape))
    assert "tile_q must be a multiple of 128" in message
    assert "Config{64, 2}" in message
    assert "kernels/tiny.cu.j2:10: error" in message


def test_an_assemblers_error_is_traced_back_to_the_template(source: Source) -> None:
    kernel = """\

{{ common.kernel(plan) }}(u32* p) {
  p[0] = 1;
  asm volatile("bogus.b32 %0;" ::"r"(p[1]));
}
"""
    message = failure(source(TOP + kernel))
    assert "kernels/tiny.cu.j2:7: error: Not a name of any known instruction: 'bogus'" in message
    assert '7 |   asm volatile("bogus.b32' in message
    assert "in the PTX: bogus.b32" in message


def test_an_instruction_that_the_architecture_lacks_is_traced_to_its_header(source: Source) -> None:
    text = TOP + "{{ common.kernel(plan) }}(float* p) { reduce_add_x4(p, {1, 2, 3, 4}); }\n"
    message = failure(source(text, arch=get_arch("sm_80")))
    assert "flashgen/ptx/copy.cuh:" in message
    assert "in the PTX: red.global.add.v4.f32" in message


def test_warnings_do_not_bury_the_error(source: Source) -> None:
    message = failure(source(TOP + "{{ common.kernel(plan) }}() {\n  int unused;\n  wrong();\n}\n"))
    assert "warning" not in message
    assert "kernels/tiny.cu.j2:6: error" in message


def test_an_error_in_an_edited_source_names_its_own_line(source: Source) -> None:
    good = source(TOP + "{{ common.kernel(plan) }}() {}\n")
    edited = KernelSource(good.plan, "int first;\nint second = wrong;\n" + good.text)
    assert "tiny.cu:2: error" in failure(edited)


def test_an_endless_log_is_cut(source: Source) -> None:
    long_line = "int v = wrong; //" + "x" * 5000
    with pytest.raises(CompileError) as caught:
        compile_source(source("\n".join([long_line] * 60) + "\n"))
    assert len(caught.value.log) < 70_000
    assert caught.value.log.endswith("(the log goes on)")
    assert len(str(caught.value)) <= 2_000


def test_a_source_without_its_kernel_is_refused(source: Source) -> None:
    message = failure(source(TOP + 'extern "C" __global__ void other() {}\n'))
    assert message.startswith("the source of tiny defines no kernel of that name")


def test_ptx_of_a_broken_source_fails_the_same_way(source: Source) -> None:
    with pytest.raises(CompileError, match=r"kernels/tiny\.cu\.j2:1: error"):
        compile_ptx(source("int v = wrong;\n"))


def test_wgmma_that_the_assembler_serialises_is_an_error(source: Source) -> None:
    # The accumulator is touched between issue and wait.
    kernel = """\
{{ common.kernel(plan) }}(float* o, u64 a, u64 b, i32 n) {
  float d[4] = {};
  for (i32 i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 { %0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
    for (i32 e = 0; e < 4; ++e) d[e] = d[e] * o[e + i];
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
  }
  o[thread_idx()] = d[0] + d[1] + d[2] + d[3];
}
"""
    made = source(TOP + kernel, arch=get_arch("sm_90a"))
    binary = compile_source(made)
    with pytest.raises(SerialisedError) as error:
        require_registers(made.plan, binary)
    message = str(error.value)
    assert "wait for each other" in message
    assert "(C75" in message


def test_a_finding_of_the_emulator_names_the_template_line(source: Source) -> None:
    kernel = """\
struct Params { float* p; };
{{ common.kernel(plan) }}(FLASHGEN_GRID_CONSTANT Params p) {
{% if true %}
  cp_async_4(0, Place::current().tile + p.p, 4);
{% endif %}
}
"""
    made = source('#include "flashgen/element.cuh"\n' + TOP + kernel)
    with pytest.raises(EmulationError) as caught:
        load(made).launch(1, bytes(8))
    assert (caught.value.file, caught.value.line) == ("kernels/tiny.cu.j2", 8)
    edited = KernelSource(made.plan, "\n" + made.text)
    with pytest.raises(EmulationError) as caught:
        load(edited).launch(1, bytes(8))
    place = next(n for n, line in enumerate(edited.text.split("\n"), start=1) if "cp_async_4(0" in line)
    assert (caught.value.file, caught.value.line) == ("tiny.cu", place)
