from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from flashgen.errors import CompileError
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import render_afresh

Write = Callable[..., None]


def code(plan: KernelPlan) -> list[str]:
    return [line for line in render_afresh(plan).text.split("\n") if line]


def test_headers_are_put_in_place_once_each(templates: Write, tiny: KernelPlan) -> None:
    templates(
        '#include "flashgen/b.cuh"\n#include "flashgen/a.cuh"\nint k;\n',
        a="// What a is.\n#pragma once\nint a;\n",
        b='// What b is.\n#pragma once\n#include "flashgen/a.cuh"\n\nint b;\n',
    )
    assert code(tiny) == ["// What a is.", "int a;", "// What b is.", "int b;", "int k;"]


def test_the_emulators_headers_stay_includes(templates: Write, tiny: KernelPlan) -> None:
    templates('#if defined(FLASHGEN_EMULATOR)\n#include "flashgen/emu/primitives.h"\n#endif\n')
    assert code(tiny) == ["#if defined(FLASHGEN_EMULATOR)", '#include "flashgen/emu/primitives.h"', "#endif"]


def test_a_header_inside_an_if_cannot_serve_outside_of_it(templates: Write, tiny: KernelPlan) -> None:
    templates(
        '#if X\n#else\n#include "flashgen/a.cuh"\n#endif\n#include "flashgen/a.cuh"\n',
        a="#pragma once\nint a;\n",
    )
    with pytest.raises(CompileError, match=r"kernels/tiny.cu.j2:5: flashgen/a.cuh is already in place inside an #if"):
        render_afresh(tiny)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("#if defined(X)\n#else", "#if !defined(X)"),
        ("#if !defined(X)\n#else", "#if defined(X)"),
        ("#if defined(X)", "#if defined(X)"),
    ],
)
def test_a_header_inside_an_if_serves_where_the_same_condition_holds(
    templates: Write, tiny: KernelPlan, first: str, second: str
) -> None:
    include = '#include "flashgen/a.cuh"'
    templates(f"{first}\n{include}\n#endif\n{second}\n{include}\nint k;\n#endif\n", a="#pragma once\nint a;\n")
    text = [line for line in code(tiny) if not line.startswith("#")]
    assert text == ["int a;", "int k;"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("#if defined(X)", "#if !defined(X)"),
        ("#if defined(X)\n#else", "#if defined(X)"),
        ("#if defined(X)", "#if defined(Y)"),
        ("#if defined(X) && Y\n#else", "#if !defined(X) && Y"),
        ("#if defined(X)\n#elif defined(Y)", "#if defined(Y)"),
        ("#if X > 1", "#if X > 1"),
    ],
)
def test_a_header_inside_an_if_cannot_serve_where_another_condition_holds(
    templates: Write, tiny: KernelPlan, first: str, second: str
) -> None:
    include = '#include "flashgen/a.cuh"'
    templates(f"{first}\n{include}\n#endif\n{second}\n{include}\nint k;\n#endif\n", a="#pragma once\nint a;\n")
    with pytest.raises(CompileError, match=r"flashgen/a\.cuh is already in place inside an #if"):
        render_afresh(tiny)


@pytest.mark.parametrize("include", ["<cuda_fp16.h>", '"cuda.h"', '"../x.cuh"', "MACRO"])
def test_foreign_headers_are_refused(templates: Write, tiny: KernelPlan, include: str) -> None:
    templates(f"int a;\n#include {include}\n")
    with pytest.raises(CompileError, match=r"kernels/tiny.cu.j2:2: .*" + re.escape(include)):
        render_afresh(tiny)


def test_a_missing_header_is_named_with_the_line_that_asks_for_it(templates: Write, tiny: KernelPlan) -> None:
    templates('#include "flashgen/a.cuh"\n', a='int a;\n#include "flashgen/away.cuh"\n')
    with pytest.raises(CompileError, match=r"flashgen/a.cuh:2: there is no header flashgen/away.cuh"):
        render_afresh(tiny)
