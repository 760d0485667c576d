"""What the page shows of kernels: the plan, registers, shared memory, fallbacks, and traffic to device memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

from markupsafe import Markup

from flashgen import pipeline
from flashgen.common.html import element, markup, table
from flashgen.errors import CacheError, CompileError, FlashgenError, PlanError
from flashgen.explanation import Explanation
from flashgen.lab.io.model import io_model
from flashgen.lab.page.drawings.smem import smem_map
from flashgen.plan import plan
from flashgen.plan.algorithm import describe_algorithm
from flashgen.plan.model.choices import choice_lines
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Role

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary


def whole_plan(e: Explanation) -> AttentionPlan | None:
    """The plan of all kernels of an explanation, of the forward pass where no other can be planned."""
    kernel = e.forward_kernel
    if kernel is None:
        return None
    try:
        return plan(e.spec, kernel.schedule, kernel.arch)
    except PlanError:
        return plan(replace(e.spec, direction="forward"), kernel.schedule, kernel.arch)


def plan_section(attention: AttentionPlan) -> dict[str, Any]:
    """Tables, reasons and drawings of a plan's kernels."""
    compiled = _compiled(attention)
    kernels = [kernel for kernel in attention.kernels if kernel.reasons or kernel.choice is not None]
    return {
        "arch": f"{attention.arch.name} ({attention.arch.example})",
        "table": Markup(markup(_table(attention, compiled))),
        "compiled": _compilation(attention, compiled),
        "kernels": [_reasons(kernel) for kernel in kernels],
        "fallbacks": [str(other.forward) for other in pipeline.fallbacks(attention)],
        "memory": [_memory(kernel) for kernel in attention.kernels if _is_visible(kernel)],
    }


def _table(attention: AttentionPlan, compiled: dict[Role, Binary]) -> Element:
    heads, *rows = attention.table
    if not compiled:
        return table(heads, rows)
    cells = [(*row, *_resources(compiled.get(k.role))) for row, k in zip(rows, attention.kernels, strict=True)]
    return table((*heads, "registers", "spilled bytes"), cells)


def _compiled(attention: AttentionPlan) -> dict[Role, Binary]:
    """The compiled kernels that the cache holds; none where the compiler that names them is missing."""
    try:
        return pipeline.kept(pipeline.sources(attention))
    except (CompileError, CacheError):
        return {}


def _resources(binary: Binary | None) -> tuple[str, str]:
    if binary is None:
        return "-", "-"
    return str(binary.resources.registers), str(binary.resources.spill_bytes)


def _compilation(attention: AttentionPlan, compiled: dict[Role, Binary]) -> str:
    if len(compiled) == len(attention.kernels):
        return "Registers are per thread, as the assembler reports them."
    missing = ", ".join(kernel.role for kernel in attention.kernels if kernel.role not in compiled)
    return f"Not compiled: {missing}. The build at the end of this page compiles them; then registers appear here."


def _reasons(kernel: KernelPlan) -> dict[str, Any]:
    lines = choice_lines(kernel)
    passed_over = kernel.choice.passed_over if kernel.choice else ()
    return {
        "title": f"{kernel.role}: {kernel.name}",
        "algorithm": describe_algorithm(kernel),
        # The last lines of a choice are what it passed over.
        "lines": lines[: len(lines) - len(passed_over)],
        "passed_over": passed_over,
    }


def _is_visible(kernel: KernelPlan) -> bool:
    """Whether the drawing of its shared memory shows more than an empty box."""
    return 100 * kernel.smem.bytes >= kernel.arch.max_smem_per_block


def _memory(kernel: KernelPlan) -> dict[str, Any]:
    limit = kernel.arch.max_smem_per_block
    regions = [(r.name, f"{r.offset:,}", f"{r.bytes:,}", r.note) for r in kernel.smem.regions]
    return {
        "caption": f"{kernel.name}: {kernel.smem.bytes:,} of {limit:,} bytes",
        "drawing": Markup(markup(smem_map(kernel))),
        "regions": Markup(markup(table(("region", "offset", "bytes", "holds"), regions))),
    }


def traffic(e: Explanation) -> Markup | None:
    """The table of ``fg.lab.io_model``, or why it does not model the spec."""
    kernel = e.forward_kernel
    if kernel is None:
        return None
    try:
        found = io_model(e.spec, e.len_q, e.len_kv, arch=kernel.arch, schedule=kernel.schedule)
    except FlashgenError as error:
        return Markup(markup(element("p", f"Not modelled: {error}.")))
    return Markup(found._repr_html_())
