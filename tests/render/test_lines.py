from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashgen.errors import CompileError
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import KernelSource, Origin, render_afresh
from flashgen.render.lines import line_table

Write = Callable[..., None]
TEMPLATE = "kernels/tiny.cu.j2"


def written(plan: KernelPlan) -> dict[str, Origin]:
    """Line of the text -> where it is written."""
    source = render_afresh(plan)
    return dict(zip(source.text.splitlines(), line_table(source), strict=True))


def test_every_statement_has_its_own_template_line(templates: Write, tiny: KernelPlan) -> None:
    templates(
        "int a;\n"
        "{% if plan.spec.needs_backward %}\n"
        "int never;\n"
        "{% else %}\n"
        "int b;\n"
        "{% endif %}\n"
        "{# a remark\n   of two lines #}\n"
        "int c;\n"
        "  {% set name = 'd' %}\n"
        "int {{ name }};\n"
        "{{ 'int' }} e;\n"
    )
    lines = written(tiny)
    for statement, number in {"int a;": 1, "int b;": 5, "int c;": 9, "int d;": 11, "int e;": 12}.items():
        assert lines[statement] == Origin(TEMPLATE, number)
    assert "int never;" not in lines


def test_a_source_has_no_line_directives(tiny: KernelPlan) -> None:
    assert "#line" not in render_afresh(replace(tiny, template="forward.cu.j2")).text


def test_an_edited_comment_of_a_header_changes_that_line_alone(templates: Write, tiny: KernelPlan) -> None:
    kernel = '// Top.\n\n#include "flashgen/part.cuh"\nextern "C" __global__ void tiny() { used(); }\n'
    part = "// What it is. More of it.\n#pragma once\n\n// Why.\nvoid unused() {}\n\n// {}\nvoid used() {}\n"
    templates(kernel, part=part.replace("// {}", "// So that."))
    before = render_afresh(tiny).text.split("\n")
    templates(kernel, part=part.replace("// {}", "// For that.").replace("// Why.", "// Why.\n// And how."))
    after = render_afresh(tiny).text.split("\n")
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [("// So that.", "// For that.")]


def test_macros_keep_the_lines_of_the_file_that_defines_them(templates: Write, tiny: KernelPlan) -> None:
    templates('{% import "kernels/common.j2" as common %}\n{{ common.config(plan) }}\nint after;\n')
    origins = written(tiny)
    config = next(origin for text, origin in origins.items() if ".tile_q" in text)
    stages = next(origin for text, origin in origins.items() if ".stages" in text)
    assert config.file == "kernels/common.j2"
    assert config == stages
    assert origins["int after;"] == Origin(TEMPLATE, 3)


def test_the_lines_of_an_edited_source_are_its_own(templates: Write, tiny: KernelPlan) -> None:
    templates("int a;\n")
    assert line_table(KernelSource(tiny, "int a;\nint b;"))[1] == Origin("tiny.cu", 2)


def test_marks_leave_no_trace_and_no_trailing_blanks(templates: Write, tiny: KernelPlan) -> None:
    templates("\n\n  {% if true %}\nint a;   \n  {% endif %}\n\n\n\nint b;\n\n\n")
    text = render_afresh(tiny).text
    assert text.isascii()
    assert text.split("\n") == ["int a;", "", "int b;", ""]


def test_the_lines_of_real_sources_hold_the_text_of_their_origins(tiny: KernelPlan) -> None:
    from flashgen.render.paths import line_at

    source = render_afresh(replace(tiny, template="forward.cu.j2"))
    header_lines = [
        (line, origin)
        for line, origin in zip(source.text.splitlines(), line_table(source), strict=True)
        if origin.file.startswith("flashgen/") and line.strip(" {};") and not line.startswith(("#", "//", "}"))
    ]
    assert len(header_lines) > 300
    for line, origin in header_lines:
        text = (line_at(origin) or "").strip()
        # A branch that the config decides is indented less, and stands without its condition. A function of which one
        # statement is left is one line, which begins as its first line does.
        assert line.strip().removesuffix("}") in text or (text.endswith("{") and line.strip().startswith(text))


@pytest.mark.parametrize(
    ("template", "place", "what"),
    [
        ("int a;\n{{ plan.nothing }}\n", ":2:", "no attribute 'nothing'"),
        ("int a;\n\n{{ missing }}\n", ":3:", "'missing' is undefined"),
        ("int a;\n{% if %}\n", ":2:", "Expected an expression"),
        ("int a;\n\n\n{{ none }}\n", ":4:", "no C++ spelling"),
        ("{{ plan.constant('nothing') }}\n", ":1:", "KeyError"),
        ("\n{{ 1 / 0 }}\n", ":2:", "ZeroDivisionError"),
        ('{% include "kernels/away.j2" %}\n', ":1:", "away.j2"),
    ],
)
def test_mistakes_in_a_template_name_its_line_and_quote_it(
    templates: Write, tiny: KernelPlan, template: str, place: str, what: str
) -> None:
    templates(template)
    with pytest.raises(CompileError) as error:
        render_afresh(tiny)
    message = str(error.value)
    line = int(place.strip(":"))
    assert message.startswith(TEMPLATE + place)
    assert what in message
    assert f"{line} | {template.splitlines()[line - 1]}" in message


def test_a_missing_template_is_named(templates: Write, tiny: KernelPlan) -> None:
    with pytest.raises(CompileError, match=r"tiny\.cu\.j2"):
        render_afresh(tiny)
