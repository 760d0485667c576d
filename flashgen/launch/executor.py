"""Runs a kernel's calls: finds or prepares the call, allocates outputs, launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.append import Appender
from flashgen.launch.arguments import check_backward, check_forward, check_scale
from flashgen.launch.array import MAX_ACCESS_BYTES, ArrayInfo, Framework, alignment, canonical
from flashgen.launch.boxes import encoded_maps
from flashgen.launch.cache_arrays import is_packed
from flashgen.launch.cached import cached_problem, cached_values, combine_steps, partial_outputs, with_splits
from flashgen.launch.call import (
    BACKWARD_OUTPUTS,
    BACKWARD_ROLES,
    Call,
    Output,
    backward_outputs,
    call_values,
    forward_outputs,
    host_buffer,
    make_ready,
    make_steps,
)
from flashgen.launch.captures import Captures
from flashgen.launch.frameworks import common_framework, framework_of
from flashgen.launch.gradients import Gradients
from flashgen.launch.packed import as_batch, longest, packed_values, queries_as_batch, without_batch
from flashgen.launch.packing import Value
from flashgen.launch.side import NOTHING, Side, SideArguments, check_on_host
from flashgen.launch.target import Buffer, Ready, Target
from flashgen.launch.variant import Variant
from flashgen.plan.model import AttentionPlan, Pass, Problem, Role
from flashgen.spec import Dropout, KVCache, Rotary, Sequences

_NAMES: dict[Pass, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("do", "q", "k", "v", "out", "lse", "dlse"),
}
_ROLES: dict[Pass, tuple[Role, ...]] = {"forward": ("survey", "forward"), "backward": BACKWARD_ROLES}
#: The arguments that kernels access in vectors, so whose alignment counts: all but ``lse`` and ``dlse``, the last ones.
_STRIDED = 5
#: Kernels that divide by the scale are for larger ones: what is divided, a log-sum-exp, must not overflow.
SMALLEST_DIVISOR = 1e-30
#: How many combinations of shapes and strides are remembered per kernel and pass.
_CALLS_KEPT = 1024

MakeVariant = Callable[[int], Variant]
Workspaces = Callable[[AttentionPlan, Problem], Mapping[str, int]]
Maps = Mapping[Role, Mapping[str | None, Value]]


class Executor:
    """Calls of one built kernel; safe to use from many threads."""

    def __init__(self, variant: Variant, make_variant: MakeVariant, target: Target, workspaces: Workspaces) -> None:
        self.spec = variant.plan.spec
        self.target = target
        self._make_variant = make_variant
        self._workspaces = workspaces
        self._default = max(k.access_bytes for k in variant.plan.kernels)
        self._variants = {self._default: variant}
        self._mapped_kernels = [plan for plan in variant.plan.kernels if plan.boxes]
        self._loaded: dict[tuple[int, int, bool], Mapping[Role, Ready]] = {}
        self._lock = threading.Lock()
        expressions = variant.plan.kernels[0].expressions
        self._captures = None if expressions is None else Captures(self.spec, expressions)
        self._takes_tensors = self._captures is not None and len(self._captures.names) > 0
        self._tables = 0 if expressions is None else len(expressions.tables)
        self._gradients = Gradients(expressions)
        self._side = SideArguments(self.spec)
        self._append = Appender(self.spec, target, lambda device, stream: self._kernels(self._default, device, stream))
        #: Whether calls bring nothing but q, k and v, as most do.
        self._is_plain = not self._takes_tensors and not self._side.places
        self._forward_calls: dict[Any, Call] = {}
        self._backward_calls: dict[Any, Call] = {}

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale: Any = None,
        stream: Any = None,
        captured: Mapping[str, Any] | None = None,
        dropout: Dropout | None = None,
        sequences: Sequences | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Any, Any]:
        """``(o, lse)`` of a forward pass."""
        target = self.target
        target.check()
        if self._is_plain and not captured and dropout is None and sequences is None and cache is None:
            side, arrays = NOTHING, (q, k, v)
        else:
            side = self._side.of(dropout, sequences, cache)
            arrays = (*side.arrays, *self._captured(captured), q, k, v)
        if scale is not None:
            scale = check_scale(scale)
        framework = framework_of(q)
        try:
            signature, pointers = framework.signature(arrays, stream)
        except (AttributeError, TypeError) as error:
            raise _unreadable(framework, "forward", arrays, error) from error
        key = (signature, scale, side.key)
        if target.on_host and self.spec.varlen:
            check_on_host(side)
        call = self._forward_calls.get(key)
        if call is None:
            call = self._prepare("forward", framework, arrays, scale, stream, side)
            _remember(self._forward_calls, key, call)
        device, steps, outputs = call
        handle = framework.stream(device, stream)
        _, shape, dtype = outputs[0]
        o = framework.empty(q, shape, dtype, handle)
        _, shape, dtype = outputs[1]
        lse = framework.empty(q, shape, dtype, handle)
        if steps:
            made = o, lse
            if len(outputs) > 2:
                tables = [framework.empty(q, shape, dtype, handle) for _, shape, dtype in outputs[2:]]
                n, made = len(arrays) - 3, (o, lse, *tables)
                pointers = (*pointers[:n], *(framework.pointer(t) for t in tables), *pointers[n:])
            if side is not NOTHING:
                pointers = self._spread(side, pointers)
            addresses = (*pointers, framework.pointer(o), framework.pointer(lse))
            buffers = self._buffers("forward", framework, arrays, call, made, side) if target.on_host else ()
            target.launch(steps, device, handle, addresses, buffers, side.numbers)
        return o, lse

    def backward(
        self,
        do: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        scale: Any = None,
        stream: Any = None,
        captured: Mapping[str, Any] | None = None,
        captured_gradients: bool = False,
        dlse: Any = None,
        dropout: Dropout | None = None,
        sequences: Sequences | None = None,
    ) -> tuple[Any, ...]:
        """``(dq, dk, dv)`` of a backward pass, and if asked for the gradients of captured tensors by name."""
        self.target.check()
        if self.spec.cache:
            raise ArgumentError("attention to a cache has no backward pass; build the spec without cache")
        side = self._side.of(dropout, sequences)
        extra = (*side.arrays, *self._captured(captured))
        arrays = (*extra, do, q, k, v, out, lse) if dlse is None else (*extra, do, q, k, v, out, lse, dlse)
        if scale is not None:
            scale = check_scale(scale)
        framework = framework_of(q)
        try:
            signature, pointers = framework.signature(arrays, stream)
        except (AttributeError, TypeError) as error:
            raise _unreadable(framework, "backward", arrays, error) from error
        key = (signature, scale, side.key, captured_gradients)
        call = self._backward_calls.get(key)
        if call is None:
            call = self._prepare("backward", framework, arrays, scale, stream, side, captured_gradients)
            _remember(self._backward_calls, key, call)
        device, steps, outputs = call
        handle = framework.stream(device, stream)
        made = [framework.empty(q, shape, dtype, handle) for _, shape, dtype in outputs]
        if steps:
            # The gradient of the output comes first in the call, and after lse among the parameters.
            n, results = len(extra), [framework.pointer(a) for a in made]
            plain = len(results) - self._tables
            inputs, of_lse = pointers[n + 1 : n + 6], 0 if dlse is None else pointers[-1]
            addresses = (*pointers[:n], *results[plain:], *inputs, pointers[n], of_lse, *results[:plain])
            on_host = self.target.on_host
            buffers = self._buffers("backward", framework, arrays, call, made, side) if on_host else ()
            self.target.launch(steps, device, handle, self._spread(side, addresses), buffers, side.numbers)
        if not captured_gradients:
            return made[0], made[1], made[2]
        names = self._gradients.names
        return made[0], made[1], made[2], dict(zip(names, made[BACKWARD_OUTPUTS:], strict=False))

    def append(
        self,
        k: Any,
        v: Any,
        new_k: Any,
        new_v: Any,
        cache: KVCache,
        q: Any = None,
        rotary: Rotary | None = None,
        stream: Any = None,
    ) -> Any:
        """Puts new keys and values into the cache; the queries, turned where there is a ``rotary``."""
        return self._append(k, v, new_k, new_v, cache, q, rotary, stream)

    def load(self, device: int, access_bytes: int | None = None, captured_gradients: bool = False) -> None:
        """Compiles and loads a variant now (the default one unless ``access_bytes`` names another)."""
        access = self._default if access_bytes is None else min(access_bytes, self._default)
        self._kernels(access, device, None)
        if access == MAX_ACCESS_BYTES and self._mapped_kernels and not self.target.takes_maps(device):
            self._kernels(access // 2, device, None)
        if captured_gradients:
            self._kernels(access, device, None, captured=True)

    def _captured(self, given: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """The captured tensors of a call, which come before its other arguments."""
        if self._captures is not None:
            return self._captures.arrays(given)
        if given:
            raise ArgumentError(f"captured={list(given)} was given, but the spec's mask and score capture no tensors")
        return ()

    def _spread(self, side: Side, pointers: tuple[int, ...]) -> tuple[int, ...]:
        """The addresses with one for each side array that there may be, given or not."""
        if not self._side.places:
            return pointers
        n = len(side.arrays)
        return (*self._side.addresses(side, pointers[:n]), *pointers[n:])

    def _names(self, pass_: Pass, side: Side, arrays: Sequence[Any]) -> tuple[str, ...]:
        """What the arrays of a call are called; those that it lacks come last."""
        captured = () if self._captures is None else self._captures.names
        return (*side.names, *captured, *_NAMES[pass_])[: len(arrays)]

    def _split(self, side: Side, infos: list[ArrayInfo]) -> tuple[list[ArrayInfo], list[ArrayInfo], list[ArrayInfo]]:
        """The side arrays of a call, the captured tensors, and its other arrays."""
        first = len(side.names)
        count = first + (0 if self._captures is None else len(self._captures.names))
        return infos[:first], infos[first:count], infos[count:]

    def _prepare(
        self,
        pass_: Pass,
        framework: Framework,
        arrays: tuple[Any, ...],
        scale: float | None,
        stream: Any,
        side: Side = NOTHING,
        captured_gradients: bool = False,
    ) -> Call:
        """Validates the arguments and settles everything that does not change with their addresses."""
        names, spec = self._names(pass_, side, arrays), self.spec
        common_framework(names, arrays)
        infos = [canonical(framework.describe(n, a)) for n, a in zip(names, arrays, strict=True)]
        beside, extra, infos = self._split(side, infos)
        packed_queries = spec.cache is not None and is_packed(side.names)
        if spec.varlen:
            infos = as_batch(infos)
        elif packed_queries:
            infos = queries_as_batch(infos)
        check = check_forward if pass_ == "forward" else check_backward
        rows = problem = check(spec, *infos, on_host=self.target.on_host)
        q, k = (infos[_NAMES[pass_].index(name)] for name in ("q", "k"))
        count = self._side.check(beside, q, k)
        if spec.cache:
            problem = cached_problem(rows, count, side.longest[0], beside, k)
        if spec.varlen:
            problem = longest(rows, count, side.longest)
        device = infos[0].device
        access = min(self._default, alignment(infos[:_STRIDED], spec.element.bytes))
        factor = spec.default_scale if scale is None else scale
        outputs, roles = self._outputs(pass_, problem, rows, self._default), _ROLES[pass_]
        access, maps = self._mapped(pass_, access, problem, factor, [*infos, *(o.at(0) for o in outputs)], device)
        kernels = self._kernels(access, device, framework.stream(device, stream))
        if spec.cache:
            most = self.target.multiprocessors(device)
            problem = with_splits(problem, side.num_splits, self._variants[access].plan.kernel("forward"), most)
        if captured_gradients:
            more = self._kernels(access, device, framework.stream(device, stream), captured=True)
            kernels, roles = {**kernels, **more}, (*roles, *more)
        outputs = self._outputs(pass_, problem, rows, access)
        fixed = spec.mask.is_band and not spec.has_own_lengths
        band = spec.mask.diagonals(problem.len_q, problem.len_kv) if fixed else (0, 0)
        values = {**call_values(problem, band, factor, infos, outputs), **side.parameters}
        if spec.varlen:
            values |= packed_values(spec.mask, rows)
        if spec.varlen or packed_queries:
            outputs = without_batch(outputs)
        if spec.cache:
            values |= cached_values(spec.mask, rows, beside, k, problem.splits)
        if self._captures is not None:
            self._captures.check(extra, q, problem)
            values |= self._captures.values(extra)
            if captured_gradients:
                outputs += self._gradients.outputs(extra)
                values |= self._gradients.values(extra, problem)
            expressions = self._variants[access].plan.kernels[0].expressions
            assert expressions is not None, "all variants evaluate the same"
            outputs += self._captures.tables(extra, expressions.stretch)
        if spec.cache:
            outputs += partial_outputs(rows, problem.splits, spec.head_dim_v)
        steps = make_steps(kernels, roles, problem, values, maps)
        if spec.cache:
            steps += combine_steps(kernels, rows, problem.splits, values)
        return Call(device, steps, outputs)

    def _outputs(self, pass_: Pass, problem: Problem, rows: Problem, access: int) -> tuple[Output, ...]:
        """What a call of the kernels for an alignment allocates; results have as many ``rows``."""
        spec = self.spec
        if pass_ == "forward":
            return forward_outputs(rows, spec.head_dim_v, spec.dtype)
        workspaces = self._workspaces(self._variants[access].plan, problem)
        return backward_outputs(rows, spec.head_dim, spec.head_dim_v, spec.dtype, workspaces)

    def _mapped(
        self, pass_: Pass, access: int, problem: Problem, scale: float, arrays: Sequence[ArrayInfo], device: int
    ) -> tuple[int, Maps]:
        """The alignment to plan a call for, and its tensor maps: kernels for less than the widest take none."""
        maps: dict[Role, Mapping[str | None, Value]] = {}
        if access < MAX_ACCESS_BYTES:
            return access, maps
        if pass_ == "backward" and self._mapped_kernels and not problem.len_kv:
            # Without keys there is nothing to launch for those that would write dQ, which is 0.
            return access // 2, maps
        for plan in self._mapped_kernels:
            if plan.pass_ == pass_:
                encoded = encoded_maps(plan, problem, arrays, self.target, device)
                if encoded is None or (plan.divides_by_scale and abs(scale) < SMALLEST_DIVISOR):
                    return access // 2, {}
                maps[plan.role] = encoded
        return access, maps

    def _kernels(self, access: int, device: int, stream: int | None, *, captured: bool = False) -> Mapping[Role, Ready]:
        """The loaded kernels for an alignment, those of captured gradients or the others, in the order in which
        they run; the only place that compiles or loads."""
        key = access, device, captured
        kernels = self._loaded.get(key)
        if kernels is not None:
            return kernels
        if stream is not None and self.target.is_capturing(stream, device):
            raise LaunchError(
                f"a CUDA graph is being captured, and the kernel for {access}-byte aligned arguments is not "
                f"loaded on cuda:{device}; call kernel.warmup({device}, access_bytes={access}"
                f"{', captured_gradients=True' if captured else ''}) first, or call it once before"
            )
        with self._lock:
            if access not in self._variants:
                self._variants[access] = self._make_variant(access)
            if key not in self._loaded:
                self._loaded[key] = make_ready(self._variants[access].part(captured=captured), self.target, device)
        return self._loaded[key]

    def _buffers(
        self,
        pass_: Pass,
        framework: Framework,
        arrays: Sequence[Any],
        call: Call,
        made: Sequence[Any],
        side: Side,
    ) -> tuple[Buffer, ...]:
        """What the emulator may let the kernels touch."""
        names = self._names(pass_, side, arrays)
        described = [canonical(framework.describe(n, a)) for n, a in zip(names, arrays, strict=True)]
        beside, extra, inputs = self._split(side, described)
        extra = [*beside, *extra]
        items = (*side.item_bytes, *(self._captures.item_bytes() if self._captures is not None else ()))
        outputs = [o.at(framework.pointer(a)) for o, a in zip(call.outputs, made, strict=True)]
        return (
            *(host_buffer(i, item, writable=False) for i, item in zip(extra, items, strict=True)),
            *(host_buffer(i, RESULTS[i.dtype].bytes, writable=False) for i in inputs),
            *(host_buffer(i, RESULTS[i.dtype].bytes, writable=True) for i in outputs),
        )


def _unreadable(framework: Framework, pass_: Pass, arrays: tuple[Any, ...], error: Exception) -> ArgumentError:
    """Most likely a mixture of array libraries, or no array at all: says which."""
    common_framework(_NAMES[pass_], arrays)
    return ArgumentError(f"the arguments cannot be read as {framework.name} arrays: {error}")


def _remember(calls: dict[Any, Call], key: Any, call: Call) -> None:
    if len(calls) >= _CALLS_KEPT:
        calls.clear()
    calls[key] = call
