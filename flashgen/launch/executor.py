"""Runs a kernel's calls: finds or prepares the call, allocates outputs, launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.common.checks import checked_mapping
from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.frameworks import UNREADABLE, framework_of
from flashgen.launch.call.arguments import check_scale
from flashgen.launch.call.batched_launch import Found, run
from flashgen.launch.call.call_options import NOTHING, SideArguments
from flashgen.launch.call.captures import Captures
from flashgen.launch.call.gradients import Gradients
from flashgen.launch.call.prepared import BACKWARD_RESULTS, Call, remember
from flashgen.launch.call.preparer import Preparer, Request, Workspaces
from flashgen.launch.call.probabilities import check_narrowable, check_stored
from flashgen.launch.call.scales import NO_SCALES, Scales
from flashgen.launch.kvcache.append import Appender
from flashgen.launch.quantizer import Quantizer
from flashgen.launch.target import Ready, Target
from flashgen.launch.variant import Variant
from flashgen.launch.variants import MakeVariant, Variants
from flashgen.plan.model.plans import Role
from flashgen.spec import Dropout, KVCache, Sequences


class Executor:
    """Calls of one built kernel; safe to use from many threads."""

    def __init__(self, variant: Variant, make_variant: MakeVariant, target: Target, workspaces: Workspaces) -> None:
        self._plan, self.spec = variant.plan, variant.plan.spec
        spec = self.spec
        self.target = target
        self.variants = variants = Variants(variant, make_variant, target)
        expressions = variant.plan.kernels[0].expressions
        self._captures = None if expressions is None else Captures(spec, expressions)
        self._gradients = Gradients(expressions)
        self._side = SideArguments(spec)
        self._preparer = Preparer(spec, variants, target, workspaces, self._captures, self._gradients)
        #: Calls of the append kernel.
        self.append = Appender(spec, target, self._default_kernels)
        #: Calls of the quantize kernel.
        self.quantize = Quantizer(spec, target, self._default_kernels) if spec.scale_block else None
        takes_tensors = self._captures is not None and len(self._captures.names) > 0
        #: Whether calls bring nothing but q, k and v, as most do.
        self._is_plain = not takes_tensors and not self._side.takes_arrays
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
        returns_p: bool = False,
        qv: Any = None,
        scales: Scales = NO_SCALES,
    ) -> tuple[Any, ...]:
        """``(o, lse)`` of a forward pass, and if asked for P."""
        found = self.find_forward(q, k, v, scale, stream, captured, dropout, sequences, cache, returns_p, qv, scales)
        if returns_p:
            check_narrowable(found[2])
        made = run(found, q, stream)
        if not returns_p:
            return made[0], made[1]
        # Rows of P are padded.
        return made[0], made[1], made[2][..., : k.shape[1]]

    def find_forward(
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
        returns_p: bool = False,
        qv: Any = None,
        scales: Scales = NO_SCALES,
    ) -> Found:
        """The forward call of these arguments, prepared if there was none like it before."""
        target = self.target
        target.check()
        arrays: tuple[Any, ...]
        numbers: tuple[int, ...] = ()
        if returns_p:
            check_stored(self._plan, "return_p=True")
        is_plain = self._is_plain and captured is None and dropout is None and sequences is None and cache is None
        if is_plain and scales is NO_SCALES:
            side, arrays = NOTHING, (q, k, v)
        else:
            side, beside, numbers = self._side.of(dropout, sequences, cache, scales=scales)
            arrays = (*beside, *self._captured(captured), q, k, v)
        if qv is not None or self.spec.qv:
            self._check_qv(qv)
            arrays = (*arrays, qv)
        if scale is not None:
            scale = check_scale(scale)
        framework = framework_of(q)
        try:
            signature, pointers = framework.signature(arrays, stream)
        except UNREADABLE as error:
            raise self._preparer.unreadable("forward", framework, arrays, side, error) from error
        key = signature, scale, side, returns_p
        call = self._forward_calls.get(key)
        if call is None:
            request = Request("forward", framework, arrays, signature, scale, stream, side, returns_p=returns_p)
            call = self._preparer.call(request)
            remember(self._forward_calls, key, call)
        return target, call, framework, arrays, pointers, numbers

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
        p: Any = None,
    ) -> tuple[Any, ...]:
        """``(dq, dk, dv)`` of a backward pass, and if asked for the gradients of captured tensors by name."""
        target = self.target
        target.check()
        if self.spec.cache:
            raise ArgumentError("attention to a cache has no backward pass; build the spec without cache")
        if p is not None:
            check_stored(self._plan, "p")
        side, beside, numbers = self._side.of(dropout, sequences, stored=p)
        arrays = (*beside, *self._captured(captured), do, q, k, v, out, lse)
        if dlse is not None:
            arrays = (*arrays, dlse)
        if scale is not None:
            scale = check_scale(scale)
        framework = framework_of(q)
        try:
            signature, pointers = framework.signature(arrays, stream)
        except UNREADABLE as error:
            raise self._preparer.unreadable("backward", framework, arrays, side, error) from error
        key = signature, scale, side, captured_gradients
        call = self._backward_calls.get(key)
        if call is None:
            call = self._preparer.call(
                Request("backward", framework, arrays, signature, scale, stream, side, captured_gradients)
            )
            remember(self._backward_calls, key, call)
        made = call.run(target, framework, q, pointers, stream, numbers)
        gradients = tuple(made[:BACKWARD_RESULTS])
        if not captured_gradients:
            return gradients
        return *gradients, dict(zip(self._gradients.names, made[BACKWARD_RESULTS:], strict=False))

    def _check_qv(self, qv: Any) -> None:
        """ArgumentError if a call brings ``qv`` and the kernel takes none, or the other way round."""
        if not self.spec.qv:
            raise ArgumentError("qv was given, but this kernel was built without; build one with qv=True")
        if qv is None:
            raise ArgumentError(
                "qv=None, but this kernel was built with qv=True; pass the queries for the values, "
                f"(batch, len_q, heads_q, {self.spec.head_dim_v})"
            )

    def _default_kernels(self, device: int, stream: int | None) -> Mapping[Role, Ready]:
        return self.variants.kernels(self.variants.default, device, stream)

    def _captured(self, given: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """The captured tensors of a call, which come before its other arguments."""
        if self._captures is not None:
            return self._captures.arrays(given)
        if checked_mapping(given):
            raise ArgumentError(f"captured={show(given)} was given, but the spec's mask and score capture no tensors")
        return ()
