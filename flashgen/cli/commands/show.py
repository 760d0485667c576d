"""``flashgen show``: a kernel at any step of its way: plan, source, PTX, SASS."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from typer import Option

from flashgen import pipeline
from flashgen.cli.commands.builder import Narrator, build_kernel, plan_all
from flashgen.cli.exits import UsageError
from flashgen.cli.gpu.arrays import archs_to_build, find_gpus, gpu_to_build_for
from flashgen.cli.options import with_kernel_options
from flashgen.cli.output import talk
from flashgen.cli.request import Request
from flashgen.common.show import shortened
from flashgen.errors import FlashgenError

if TYPE_CHECKING:
    from flashgen.plan.model.plans import AttentionPlan, KernelPlan

VIEW = "View"
_INSTALL = "put nvdisasm or cuobjdump on PATH, for instance by: pip install nvidia-cuda-nvdisasm"


class What(str, Enum):
    """A step on the way from spec to machine code."""

    PLAN = "plan"
    SOURCE = "source"
    PTX = "ptx"
    SASS = "sass"


@with_kernel_options
def show(
    request: Request,
    what: Annotated[What, Option("--what", help="Which step to show; default plan.", rich_help_panel=VIEW)] = What.PLAN,
    kernel: Annotated[
        str | None,
        Option(
            "--kernel",
            metavar="NAME",
            help="Which kernel, by its role or name as build prints them; default: all plans, else forward.",
            rich_help_panel=VIEW,
        ),
    ] = None,
    fallback: Annotated[
        int | None,
        Option("--fallback", metavar="N", help="The plan's Nth fallback; 0 is the plan itself.", rich_help_panel=VIEW),
    ] = None,
) -> None:
    """Print a kernel's plan, source, PTX or SASS on stdout."""
    gpus = find_gpus() if not request.archs else ()
    archs, gpu = archs_to_build(request.archs, gpus, request.spec), gpu_to_build_for(request.archs, gpus)
    if len(request.archs) > 1:
        raise UsageError(f"show takes one --arch, and {len(request.archs)} are given; leave all but one out")
    if what is What.SASS:
        _require_disassembler()
    plans = (_candidate(plan_all(request.spec, request.schedule, [arch], gpu)[0], fallback) for arch in archs)
    is_whole_plan = what is What.PLAN and kernel is None
    if is_whole_plan:
        attention = next(plans)
        shown = attention.kernels
    else:
        attention, chosen = choose(plans, kernel or "forward")
        shown = (chosen,)
    if what is What.SASS:
        role = shown[0].role
        text = pipeline.with_enough_registers(attention, lambda each: _sass(each.kernel(role)), Narrator())
        talk.print_text(text)
        return
    if fallback is None and any(each.role == "forward" for each in shown):
        _say_fallbacks(attention)
    texts = [_view(what, each) for each in shown]
    if is_whole_plan and attention.tuning:
        texts.append(str(attention.tuning))
    talk.print_text("\n\n".join(texts))


def _candidate(attention: AttentionPlan, number: int | None) -> AttentionPlan:
    """The plan, or the fallback of it that is asked for."""
    candidates = pipeline.candidates(attention) if number else (attention,)
    if number is not None and not 0 <= number < len(candidates):
        count = len(candidates) - 1
        raise UsageError(
            f"--fallback {number} is not there: the plan for {attention.arch.name} has {count} fallbacks; "
            f"{f'use 0 to {count}' if count > 0 else 'leave it out'}"
        )
    return candidates[number or 0]


def _say_fallbacks(attention: AttentionPlan) -> None:
    """Only the assembler knows whether a build takes the plan or a fallback, and this command asks none."""
    count = len(pipeline.candidates(attention)) - 1
    if count:
        last = "--fallback 1 shows it" if count == 1 else f"--fallback 1 to {count} show them"
        talk.say(f"build takes a fallback if the assembler has too few registers for a kernel of this plan; {last}")


def choose(plans: Iterable[AttentionPlan], name: str) -> tuple[AttentionPlan, KernelPlan]:
    """The first kernel with that role or name, and its plan; a UsageError lists those there are.

    A name may be that of a file that build wrote.
    """
    wanted = name.removesuffix(".cu").removesuffix(".cubin")
    there: list[str] = []
    for plan in plans:
        for kernel in plan.kernels:
            if wanted in (kernel.role, kernel.name):
                return plan, kernel
            there.append(f"{kernel.role} ({kernel.name})")
    raise UsageError(f"--kernel {shortened(name)} is no kernel of this spec; its kernels are {', '.join(there)}")


def _view(what: What, kernel: KernelPlan) -> str:
    if what is What.PLAN:
        return _plan_text(kernel)
    from flashgen.render import render

    if what is What.SOURCE:
        return render(kernel).text
    from flashgen.compile import compile_ptx

    return compile_ptx(render(kernel))


def _plan_text(kernel: KernelPlan) -> str:
    from flashgen.render.summary import summary

    return "\n".join(summary(kernel))


def _require_disassembler() -> None:
    """Before anything is compiled for it."""
    from flashgen.compile import find_disassembler

    if find_disassembler() is None:
        raise FlashgenError(f"no disassembler is installed; {_INSTALL}")


def _sass(kernel: KernelPlan) -> str:
    from flashgen.compile import disassemble
    from flashgen.render import render

    text = disassemble(build_kernel(render(kernel)).binary.image)
    if text is None:
        raise FlashgenError(f"no disassembler here reads this cubin; {_INSTALL}")
    return text
