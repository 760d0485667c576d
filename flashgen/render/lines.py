"""The line table of a source: where each line of its text is written. The text itself holds no ``#line``."""

from __future__ import annotations

from flashgen.render.engine import rendered_lines
from flashgen.render.source import KernelSource, Origin


def line_table(source: KernelSource) -> list[Origin]:
    """For each line of the text the template or header line that it comes from.

    A text that differs from the rendered one is its author's own: its lines come from nowhere else.
    """
    lines = rendered_lines(source.plan)
    if "".join(f"{text}\n" for text, _ in lines) == source.text:
        return [origin for _, origin in lines]
    return [Origin(f"{source.name}.cu", number) for number, _ in enumerate(source.text.split("\n"), start=1)]
