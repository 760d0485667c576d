from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashgen.errors import CompileError
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import Origin, render_afresh
from flashgen.render.amalgamation.line_directives import presumed_origins
from flashgen.render.engine import rendered_lines

Write = Callable[..., None]
TEMPLATE = "kernels/tiny.cu.j2"


def claimed(plan: KernelPlan) -> dict[str, Origin]:
    """Line of the text -> the template line that its directives claim."""
    text = render_afresh(plan).text
    return dict(zip(text.split("\n"), presumed_origins(text), strict=True))


def test_every_statement_claims_its_own_template_line(templates: Write, tiny: KernelPlan) -> None:
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
    lines = claimed(tiny)
    for statement, number in {"int a;": 1, "int b;": 5, "int c;": 9, "int d;": 11, "int e;": 12}.items():
        assert lines[statement] == Origin(TEMPLATE, number)
    assert "int never;" not in lines


def test_directives_stand_only_where_the_mapping_jumps(templates: Write, tiny: KernelPlan) -> None:
    templates("int a;\nint b;\n\n// why\nint c;\n{% if true %}\n}\n{% endif %}\nint d;\n")
    assert render_afresh(tiny).text == (
        '#line 1 "kernels/tiny.cu.j2"\nint a;\nint b;\n\n// why\nint c;\n}\n#line 9\nint d;\n'
    )


def test_a_directive_never_comes_between_a_comment_and_its_code(templates: Write, tiny: KernelPlan) -> None:
    templates("int a;\n{% if true %}\n{% endif %}\n\n// what b is\n// for\nint b;\n")
    assert "int a;\n\n#line 5\n// what b is\n// for\nint b;\n" in render_afresh(tiny).text


def test_a_directive_never_splits_a_macro_definition(templates: Write, tiny: KernelPlan) -> None:
    templates("#define TWO \\\n{% if true %}\n  2\n{% endif %}\nint a;\n")
    assert "#define TWO \\\n  2\n#line 5\nint a;" in render_afresh(tiny).text


def test_lines_after_a_conditional_are_mapped_whichever_branch_is_taken(templates: Write, tiny: KernelPlan) -> None:
    templates(
        '#if defined(X)\nint x;\n#else\n#include "flashgen/part.cuh"\n#endif\nint after;\n',
        part="int part;\n",
    )
    text = render_afresh(tiny).text
    assert text.endswith('#endif\n#line 6 "kernels/tiny.cu.j2"\nint after;\n')


def test_macros_keep_the_lines_of_the_file_that_defines_them(templates: Write, tiny: KernelPlan) -> None:
    templates('{% import "kernels/common.j2" as common %}\n{{ common.config(plan) }}\nint after;\n')
    origins = dict(rendered_lines(tiny))
    config = next(origin for text, origin in origins.items() if ".tile_q" in text)
    stages = next(origin for text, origin in origins.items() if ".stages" in text)
    assert config.file == "kernels/common.j2"
    assert config == stages
    assert origins["int after;"] == Origin(TEMPLATE, 3)
    assert claimed(tiny)["int after;"] == Origin(TEMPLATE, 3)


def test_marks_leave_no_trace_and_no_trailing_blanks(templates: Write, tiny: KernelPlan) -> None:
    templates("\n\n  {% if true %}\nint a;   \n  {% endif %}\n\n\n\nint b;\n\n\n")
    text = render_afresh(tiny).text
    assert text.isascii()
    assert [line for line in text.split("\n") if not line.startswith("#line")] == ["int a;", "", "int b;", ""]


def test_real_sources_claim_lines_that_hold_the_same_text(tiny: KernelPlan) -> None:
    from flashgen.render.paths import line_at

    real = replace(tiny, template="forward.cu.j2")
    text = render_afresh(real).text
    header_lines = [
        (line, origin)
        for line, origin in zip(text.split("\n"), presumed_origins(text), strict=True)
        if origin.file.startswith("flashgen/") and line.strip(" {};") and not line.startswith(("#", "//", "}"))
    ]
    assert len(header_lines) > 300
    for line, origin in header_lines:
        assert (line_at(origin) or "").rstrip() == line


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
