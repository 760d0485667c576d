"""The C++ of the gradients of captured tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.common import identifiers
from flashgen.plan.model.captured_work import CapturedGradient, Share
from flashgen.plan.model.plans import KernelPlan
from flashgen.render.expressions import Body, body_of, names_of


@dataclass(frozen=True, slots=True)
class ShareCode:
    """The text of a share, for templates."""

    name: str
    variable: str
    tensor: str
    #: The function that reads the tensor, and the parameter that points to its gradient.
    captured: str
    gradient_parameter: str
    load_text: str
    slope_text: str
    over: str
    #: Where it is summed, if it is.
    gradient: CapturedGradient | None
    slope: Body
    element: Body


def captured_code(plan: KernelPlan) -> tuple[ShareCode, ...]:
    """The shares of a kernel; the filter ``captured_code``."""
    work = plan.captured
    assert work is not None, "the template asks only where the plan has captured gradients"
    gradients = {g.tensor.name: g for g in work.summed}
    names = names_of(plan)
    return tuple(
        _share(number, share, gradients.get(share.tensor.name), names) for number, share in enumerate(work.shares)
    )


def _share(number: int, share: Share, gradient: CapturedGradient | None, names: dict[str, str]) -> ShareCode:
    from flashgen.expr import text

    indices = {f"{axis:02}": index for axis, index in enumerate(share.load.indices)}
    return ShareCode(
        name=f"Share{number}",
        variable=f"share{number}",
        tensor=share.tensor.name,
        captured=share.tensor.identifier,
        gradient_parameter=identifiers.gradient(share.tensor.name),
        load_text=text(share.load),
        slope_text=text(share.slope),
        over=share.over,
        gradient=gradient,
        slope=body_of({"value": share.slope}, names),
        element=body_of(indices, names),
    )
