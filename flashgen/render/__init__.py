"""From a kernel's plan to its source text: ``render(plan) -> KernelSource``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.render.override import overridden
from flashgen.render.paths import templates_dir
from flashgen.render.source import KernelSource, Origin

if TYPE_CHECKING:
    from flashgen.plan.model.plans import KernelPlan

__all__ = ["KernelSource", "Origin", "render", "render_afresh", "templates_dir"]


def render(plan: KernelPlan) -> KernelSource:
    """The self-contained ``.cu`` of a plan; a file in FLASHGEN_OVERRIDE_DIR takes its place."""
    text = overridden(plan)
    return render_afresh(plan) if text is None else KernelSource(plan, text)


def render_afresh(plan: KernelPlan) -> KernelSource:
    """The same from the templates, whatever an author has put in their place."""
    # The template engine is imported here, not with the package: ``import flashgen`` must stay quick.
    from flashgen.render.engine import rendered_lines

    return KernelSource(plan, "".join(f"{line}\n" for line, _ in rendered_lines(plan)))
