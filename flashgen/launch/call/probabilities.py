"""P of standard attention: a forward call may return it, and a backward call read it instead of computing it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, Framework, contiguous_strides
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import Output, make_steps, stretch_of, workspace_outputs
from flashgen.launch.target import Buffer, Ready, Step
from flashgen.plan.model.parts import score_pitch
from flashgen.plan.model.plans import AttentionPlan, Problem, Role
from flashgen.spec import AttentionSpec

#: The workspace that the argument ``p`` takes the place of.
WORKSPACE = "probabilities"
#: The kernels that compute P.
_ROLES: tuple[Role, ...] = ("scores", "softmax")
_ALIGNMENT = 16


def check_stored(plan: AttentionPlan, argument: str) -> None:
    """Refuses an argument about P for a kernel that never has P in device memory."""
    if not plan.stores_probabilities:
        raise ArgumentError(
            f"{argument} needs a kernel that stores P, and {plan.kernel('forward').algorithm} never does; build one "
            "with schedule=flashgen.Schedule(algorithm='standard'), or leave it out"
        )


def check_narrowable(framework: Framework) -> None:
    """Refuses to return P in a library whose arrays cannot be narrowed from padded rows to rows of keys."""
    if framework.name.startswith("foreign"):
        raise ArgumentError(
            "return_p=True needs arrays of torch, CuPy or NumPy, which can leave out the padding of P's rows; "
            "convert the arguments, or leave return_p out"
        )


def check_probabilities(p: ArrayInfo, spec: AttentionSpec, problem: Problem, q: ArrayInfo) -> None:
    """Refuses a P that is not laid out as the forward call returns it: rows padded to whole 16-byte chunks."""
    shape = (problem.batch, problem.heads_q, problem.len_q, problem.len_kv)
    wanted = contiguous_strides((*shape[:3], problem.score_pitch))
    if p.shape != shape or p.dtype != spec.dtype:
        raise ArgumentError(
            f"p is {p.dtype} of shape {p.shape}; with these q and k it must be {spec.dtype} of shape {shape}"
        )
    if p.device != q.device:
        raise ArgumentError(f"p is on {p.where} and q on {q.where}; put all arguments on one device")
    laid_out = all(size == 1 or have == want for size, have, want in zip(shape, p.strides, wanted, strict=True))
    if 0 not in shape and not (laid_out and p.pointer % _ALIGNMENT == 0):
        raise ArgumentError(
            f"p has strides {p.strides}, and must have {wanted} and begin at a multiple of {_ALIGNMENT} bytes; "
            "pass the array that the forward call returned"
        )


def stretch_of_probabilities(p: ArrayInfo, spec: AttentionSpec) -> Buffer:
    """The memory of P with the padding of its rows: kernels read whole chunks, and ignore what is beyond a row."""
    return stretch_of(replace(p, shape=(*p.shape[:3], score_pitch(p.shape[3]))), spec.element.bytes, writable=False)


def computing_steps(
    kernels: Mapping[Role, Ready], problem: Problem, values: Mapping[str | None, Value], names: Sequence[str]
) -> tuple[Step, ...]:
    """The launches that compute P again in a backward pass. They leave its L alone, which is an argument."""
    return make_steps(kernels, _ROLES, problem, values, {}, ["" if name == "lse" else name for name in names])


def computing_workspaces(plan: AttentionPlan, problem: Problem) -> tuple[Output, ...]:
    """Where they leave S and P."""
    return workspace_outputs(plan, "forward", problem)
