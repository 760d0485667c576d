"""Templates print a config and choose policies. Algorithms stand in the headers."""

from __future__ import annotations

import pytest
from jinja2 import Environment, nodes

from flashgen.render import paths

HOPPER = paths.templates_dir() / "kernels" / "hopper"
#: Of a template, with ``elif`` and conditions within expressions.
MOST_CONDITIONS = 15


def conditions(text: str) -> int:
    return sum(1 for _ in Environment(autoescape=False).parse(text).find_all((nodes.If, nodes.CondExpr)))


def test_each_kind_of_condition_counts() -> None:
    assert (
        conditions(
            '{% if a %}1{% elif b %}2{% else %}3{% endif %} {{ "x" if a else "y" }} {% for a in b %}{% endfor %}'
        )
        == 3
    )


@pytest.mark.parametrize("template", sorted(path.name for path in HOPPER.glob("*.j2")))
def test_templates_of_hoppers_kernels_have_few_conditions(template: str) -> None:
    shared = "" if template == "backward.j2" or not template.startswith("backward") else "backward.j2"
    texts = [(HOPPER / name).read_text(encoding="utf-8") for name in (template, shared) if name]
    assert sum(map(conditions, texts)) <= MOST_CONDITIONS
