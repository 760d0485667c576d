"""``flashgen show``: a kernel at any step of its way: plan, source, PTX, SASS."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

from typer import Option

from flashgen.cli import talk
from flashgen.cli.builder import build_kernel, plan_all
from flashgen.cli.exits import UsageError
from flashgen.cli.gpus import archs_to_build, find_gpus
from flashgen.cli.options import with_kernel_options
from flashgen.cli.request import Request
from flashgen.errors import FlashgenError

if TYPE_CHECKING:
    from flashgen.plan.model import AttentionPlan, KernelPlan

VIEW = "View"


class What(str, Enum):
    """A step on the way from spec to machine code."""

    PLAN = "plan"
    SOURCE = "source"
    PTX = "ptx"
    SASS = "sass"


class RoleName(str, Enum):
    """The kernels of a plan."""

    FORWARD = "forward"
    PREPARE = "prepare"
    MAIN = "main"
    QUERY = "query"
    FINISH = "finish"


@with_kernel_options
def show(
    request: Request,
    what: Annotated[What, Option("--what", help="Which step to show.", rich_help_panel=VIEW)] = What.PLAN,
    kernel: Annotated[
        RoleName | None,
        Option("--kernel", help="Which kernel; default: all plans, else forward.", rich_help_panel=VIEW),
    ] = None,
) -> None:
    """Print a kernel's plan, source, PTX or SASS on stdout."""
    archs = archs_to_build(request.archs, find_gpus() if not request.archs else ())
    if len(request.archs) > 1:
        raise UsageError(f"show takes one --arch, and {len(request.archs)} are given; leave all but one out")
    (plan,) = plan_all(request.spec, request.schedule, archs[:1])
    if what is What.PLAN and kernel is None:
        talk.print_text("\n\n".join(_plan_text(each) for each in plan.kernels))
    else:
        talk.print_text(_view(what, choose(plan, kernel or RoleName.FORWARD)))


def choose(plan: AttentionPlan, role: RoleName) -> KernelPlan:
    """The kernel of that role, or an error that names those there are."""
    for kernel in plan.kernels:
        if kernel.role == role.value:
            return kernel
    roles = ", ".join(kernel.role for kernel in plan.kernels)
    raise UsageError(f"--kernel {role.value} is not part of {plan.spec.describe()}; its kernels are {roles}")


def _view(what: What, kernel: KernelPlan) -> str:
    if what is What.PLAN:
        return _plan_text(kernel)
    from flashgen.render import render

    if what is What.SOURCE:
        return render(kernel).text
    if what is What.PTX:
        from flashgen.compile import compile_ptx

        return compile_ptx(render(kernel))
    return _sass(kernel)


def _plan_text(kernel: KernelPlan) -> str:
    from flashgen.render.summary import summary

    return "\n".join(summary(kernel))


def _sass(kernel: KernelPlan) -> str:
    from flashgen.cache import default_cache
    from flashgen.compile import disassemble
    from flashgen.render import render

    text = disassemble(build_kernel(render(kernel), default_cache()).binary.image)
    if text is None:
        raise FlashgenError(
            "no disassembler reads this cubin; put nvdisasm or cuobjdump on PATH, "
            "for instance by: pip install nvidia-cuda-nvdisasm"
        )
    return text
