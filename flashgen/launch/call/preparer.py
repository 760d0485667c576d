"""Prepares calls: validates the arguments and computes everything that does not depend on their addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flashgen.common.identifiers import captured
from flashgen.dtypes import ARGUMENTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, Framework, alignment, canonical
from flashgen.launch.arrays.frameworks import common_framework, unreadable
from flashgen.launch.call.arguments import check_backward, check_forward
from flashgen.launch.call.call_options import NOTHING, P, Side, SideArguments, offsets_of
from flashgen.launch.call.captures import Captures
from flashgen.launch.call.gradients import Gradients
from flashgen.launch.call.packed import (
    as_batch,
    clear_gaps_steps,
    longest,
    packed_values,
    queries_as_batch,
    without_batch,
)
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import (
    BACKWARD_RESULTS,
    BACKWARD_ROLES,
    FORWARD_RESULTS,
    FORWARD_ROLES,
    PARAMETER_NAMES,
    Call,
    Output,
    backward_outputs,
    call_values,
    forward_outputs,
    make_call,
    make_steps,
    stretch_of,
    workspace_outputs,
)
from flashgen.launch.call.probabilities import (
    WORKSPACE,
    check_probabilities,
    computing_steps,
    computing_workspaces,
    stretch_of_probabilities,
)
from flashgen.launch.call.scales import input_scale_values
from flashgen.launch.kvcache.cache_arrays import is_packed
from flashgen.launch.kvcache.cached import cached_problem, cached_values, combine_steps, partial_outputs
from flashgen.launch.kvcache.decode import Parts
from flashgen.launch.target import Buffer, Ready, Target
from flashgen.launch.variants import Maps, Variants
from flashgen.plan.cache import ATTENDING, DECODE
from flashgen.plan.cached_calls import CachedCall, attending_kernel, suits_boxes
from flashgen.plan.calls import PHASES, runs_at_once
from flashgen.plan.decode.parts import check_units
from flashgen.plan.fallbacks import access_without_maps
from flashgen.plan.model.plans import AttentionPlan, Pass, Problem, Role
from flashgen.plan.splits import with_splits
from flashgen.spec import AttentionSpec

_NAMES: dict[Pass, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "qv"),
    "backward": ("do", "q", "k", "v", "out", "lse", "dlse"),
}
_ROLES: dict[Pass, tuple[Role, ...]] = {"forward": FORWARD_ROLES, "backward": BACKWARD_ROLES}
#: The arguments that kernels access in vectors, so whose alignment counts: all but ``lse`` and ``dlse``, the last ones.
_STRIDED = 5

Workspaces = Callable[[AttentionPlan, Problem], Mapping[str, int]]


class Request(NamedTuple):
    """What is asked for; ``arrays`` are the side arguments, what was captured, and the arguments of the pass."""

    pass_: Pass
    framework: Framework
    arrays: tuple[Any, ...]
    #: All that is known of the arrays.
    signature: Any
    scale: float | None
    stream: Any
    side: Side = NOTHING
    captured_gradients: bool = False
    #: Whether a forward call returns P.
    returns_p: bool = False

    @property
    def reads_p(self) -> bool:
        """Whether a backward call brings P."""
        return P in self.side.names


class _Given(NamedTuple):
    """The arrays of a call."""

    beside: list[ArrayInfo]
    captured: list[ArrayInfo]
    infos: list[ArrayInfo]

    def of(self, pass_: Pass, name: str) -> ArrayInfo:
        """One of the arguments of the pass."""
        return self.infos[_NAMES[pass_].index(name)]


def _runs_at_once(forward: Ready | None, problem: Problem) -> bool:
    return (
        forward is None
        or not forward.plan.is_cooperative
        or runs_at_once(forward.plan, problem, forward.most_blocks or 0)
    )


class Preparer:
    """Prepares the calls of one built kernel."""

    def __init__(
        self,
        spec: AttentionSpec,
        variants: Variants,
        target: Target,
        workspaces: Workspaces,
        captures: Captures | None,
        gradients: Gradients,
    ) -> None:
        self._spec, self._variants, self._target = spec, variants, target
        self._workspaces = workspaces
        self._captures, self._gradients = captures, gradients
        self._side = SideArguments(spec)

    def call(self, request: Request) -> Call:
        """The call, its arguments validated; an ArgumentError lists what is wrong with them."""
        spec, given = self._spec, self._given(request)
        rows, problem = self._sizes(request, given)
        device = given.infos[0].device
        access, maps = self._access(request, given, rows, problem)
        kernels, roles = self._kernels(request, access, device)
        plan = self._variants.plan(access)
        parts, launched = None, problem
        if spec.cache:
            attending = attending_kernel(plan, problem, self._cached_call(request, given))
            roles = tuple(role for role in roles if role == attending.role or role not in ATTENDING)
            if attending.role == "forward":
                most, asked = self._target.multiprocessors(device), request.side.num_splits
                # One block goes over all keys of a row, so its result depends on no other row.
                asked = 1 if request.side.batch_invariant else asked
                launched = problem = with_splits(problem, asked, attending, most)
            if attending.role == DECODE:
                check_units(attending, problem)
                # Rows without keys have results, too. Without rows there is nothing to launch.
                launched = replace(problem, len_kv=max(problem.len_kv, 1) if problem.len_q else 0)
                parts = Parts.of(kernels[DECODE], launched, request.side)
        if request.pass_ == "forward" and not _runs_at_once(kernels.get("forward"), problem):
            roles = PHASES
        values = self._values(request, given, rows, problem, plan)
        results, workspaces = self._allocated(request, given, rows, problem, plan)
        if parts is not None:
            values |= parts.values
            workspaces += parts.outputs
        names = self._parameters(request, (*results, *workspaces))
        steps = make_steps(kernels, roles, launched, values, maps, names)
        if self._computes_again(request, plan):
            steps = (*computing_steps(kernels, problem, values, names), *steps)
        if spec.cache:
            steps += combine_steps(kernels, rows, problem.splits, values, names)
        if self._has_packed_rows(request):
            steps += clear_gaps_steps(kernels, request.pass_, rows, values, names)
        if not self._target.on_host:
            return make_call(request.framework, device, steps, results, workspaces)
        q, k = (given.of(request.pass_, name) for name in "qk")
        checked = offsets_of(request.side, given.beside, q, k, has_cache=spec.cache is not None)
        return make_call(request.framework, device, steps, results, workspaces, self._stretches(request), checked)

    def _cached_call(self, request: Request, given: _Given) -> CachedCall:
        page_size = given.of(request.pass_, "k").shape[1] if self._spec.cache == "paged" else None
        has_leftpad = any(array.name == "cache_leftpad" for array in given.beside)
        return CachedCall(page_size, has_leftpad, request.side.num_splits, request.side.batch_invariant)

    def _stretches(self, request: Request) -> list[Buffer]:
        """The memory that kernels may read in the arrays of a call."""
        given = self._described(request)
        items = (*request.side.item_bytes, *(self._captures.item_bytes() if self._captures is not None else ()))
        extra = (*given.beside, *given.captured)
        return [
            *(
                stretch_of_probabilities(i, self._spec) if i.name == P else stretch_of(i, item, writable=False)
                for i, item in zip(extra, items, strict=True)
            ),
            *(stretch_of(i, ARGUMENTS[i.dtype].bytes, writable=False) for i in given.infos),
        ]

    def unreadable(
        self, pass_: Pass, framework: Framework, arrays: tuple[Any, ...], side: Side, error: Exception
    ) -> ArgumentError:
        """Raises an error that names the array of another library."""
        return unreadable(self._names_of(pass_, side)[: len(arrays)], arrays, framework, error)

    def _names(self, request: Request) -> tuple[str, ...]:
        """The names of a call's arrays; absent ones come last."""
        return self._names_of(request.pass_, request.side)[: len(request.arrays)]

    def _names_of(self, pass_: Pass, side: Side) -> tuple[str, ...]:
        captured_names = () if self._captures is None else self._captures.names
        return *side.names, *captured_names, *_NAMES[pass_]

    def _described(self, request: Request) -> _Given:
        infos = [canonical(info) for info in request.framework.describe(self._names(request), request.signature)]
        first = len(request.side.names)
        count = first + (0 if self._captures is None else len(self._captures.names))
        return _Given(infos[:first], infos[first:count], infos[count:])

    def _given(self, request: Request) -> _Given:
        """The arrays of a call, packed ones as a batch of one."""
        common_framework(self._names(request), request.arrays)
        given = self._described(request)
        if self._spec.varlen:
            return given._replace(infos=as_batch(given.infos))
        if self._has_packed_queries(request):
            return given._replace(infos=queries_as_batch(given.infos))
        return given

    def _has_packed_rows(self, request: Request) -> bool:
        return self._spec.varlen or self._has_packed_queries(request)

    def _has_packed_queries(self, request: Request) -> bool:
        return self._spec.cache is not None and is_packed(request.side.names)

    def _sizes(self, request: Request, given: _Given) -> tuple[Problem, Problem]:
        """Those of the results, and those that grids are made for."""
        check = check_forward if request.pass_ == "forward" else check_backward
        rows = check(self._spec, *given.infos, on_host=self._target.on_host)
        k = given.of(request.pass_, "k")
        q = given.of(request.pass_, "q")
        count = self._side.check(given.beside, q, k)
        for p in given.beside:
            if p.name == P:
                check_probabilities(canonical(p), self._spec, rows, q)
        if self._spec.cache:
            return rows, cached_problem(rows, count, request.side.longest[0], given.beside, k)
        return rows, longest(rows, count, request.side.longest) if self._spec.varlen else rows

    def _access(self, request: Request, given: _Given, rows: Problem, problem: Problem) -> tuple[int, Maps]:
        """The alignment to plan for, and the tensor maps."""
        widest = self._variants.default
        plan = self._variants.plan(widest)
        outputs = self._outputs(request, rows, problem, plan)
        every = [*given.infos, *(output.at(0) for output in outputs)]
        aligned = (alignment((info,), ARGUMENTS[info.dtype].bytes) for info in given.infos[:_STRIDED])
        access = min(widest, *aligned)
        if self._spec.cache:
            call = self._cached_call(request, given)
            if not suits_boxes(attending_kernel(plan, problem, call), call):
                access = min(access, access_without_maps(plan))
        device = given.infos[0].device
        return self._variants.mapped(request.pass_, access, problem, self._scale(request), every, device)

    def _kernels(self, request: Request, access: int, device: int) -> tuple[Mapping[Role, Ready], tuple[Role, ...]]:
        """The loaded kernels, in launch order."""
        stream, roles = request.framework.stream(device, request.stream), _ROLES[request.pass_]
        kernels = self._variants.kernels(access, device, stream)
        if not request.captured_gradients:
            return kernels, roles
        more = self._variants.kernels(access, device, stream, captured=True)
        return {**kernels, **more}, (*roles, *more)

    def _computes_again(self, request: Request, plan: AttentionPlan) -> bool:
        """Whether a backward pass needs P and does not bring it."""
        return request.pass_ == "backward" and plan.stores_probabilities and not request.reads_p

    def _scale(self, request: Request) -> float:
        scale = self._spec.default_scale if request.scale is None else request.scale
        return scale * request.side.factor

    def _outputs(self, request: Request, rows: Problem, problem: Problem, plan: AttentionPlan) -> tuple[Output, ...]:
        """What a call of the plan's kernels makes in any case; results have as many ``rows``."""
        spec = self._spec
        if request.pass_ == "forward":
            return forward_outputs(rows, spec.head_dim_v, spec.out_element.name)
        return backward_outputs(rows, spec.head_dim, spec.head_dim_v, spec.dtype, self._workspaces(plan, problem))

    def _allocated(
        self, request: Request, given: _Given, rows: Problem, problem: Problem, plan: AttentionPlan
    ) -> tuple[tuple[Output, ...], tuple[Output, ...]]:
        """The allocations of a call: results and non-empty workspaces."""
        spec, outputs = self._spec, self._outputs(request, rows, problem, plan)
        if self._has_packed_rows(request):
            outputs = without_batch(outputs)
        count = FORWARD_RESULTS if request.pass_ == "forward" else BACKWARD_RESULTS
        results, workspaces = outputs[:count], outputs[count:]
        if request.captured_gradients:
            gradients, sums = self._gradients.outputs(given.captured)
            results, workspaces = results + gradients, workspaces + sums
        if self._captures is not None:
            expressions = plan.kernels[0].expressions
            assert expressions is not None, "all variants evaluate the same"
            workspaces += self._captures.tables(given.captured, expressions.stretch)
        stored = workspace_outputs(plan, request.pass_, problem)
        if request.returns_p:
            results += tuple(output for output in stored if output.name == WORKSPACE)
            stored = tuple(output for output in stored if output.name != WORKSPACE)
        workspaces += stored
        if self._computes_again(request, plan):
            workspaces += computing_workspaces(plan, problem)
        if spec.cache:
            workspaces += partial_outputs(rows, problem.splits, spec.head_dim_v)
        return results, tuple(w for w in workspaces if 0 not in w.shape)

    def _values(
        self, request: Request, given: _Given, rows: Problem, problem: Problem, plan: AttentionPlan
    ) -> dict[str | None, Value]:
        """All parameters except addresses."""
        spec, outputs = self._spec, self._outputs(request, rows, problem, plan)
        fixed = spec.mask.is_band and not spec.has_own_lengths
        band = spec.mask.diagonals(problem.len_q, problem.len_kv) if fixed else (0, 0)
        values = call_values(problem, band, self._scale(request), given.infos, outputs)
        values |= request.side.parameters
        values |= input_scale_values(spec, given.beside)
        if spec.varlen:
            values |= packed_values(spec.mask, rows)
        if spec.cache:
            q, k = (given.of(request.pass_, name) for name in "qk")
            values |= cached_values(spec, rows, given.beside, q, k, problem.splits)
        if self._captures is not None:
            self._captures.check(given.captured, given.of(request.pass_, "q"), problem)
            values |= self._captures.values(given.captured)
        if request.captured_gradients:
            values |= self._gradients.values(given.captured, problem)
        return values

    def _parameters(self, request: Request, outputs: Sequence[Output]) -> tuple[str, ...]:
        """The parameter names of all addresses that a call passes, in order."""
        first, captured_names = len(request.side.names), () if self._captures is None else self._captures.names
        own = self._names(request)[first + len(captured_names) :]
        arrays = (*request.side.names, *map(captured, captured_names), *own)
        return (*self._side.number_names, *(PARAMETER_NAMES.get(n, n) for n in arrays), *(o.name for o in outputs))
