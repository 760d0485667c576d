"""Calls of the append kernel, which appends keys and values to a cache and rotates them and the queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashgen.common.show import show
from flashgen.dtypes import ARGUMENTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, Framework, canonical
from flashgen.launch.arrays.frameworks import UNREADABLE, common_framework, framework_of, unreadable
from flashgen.launch.call.arguments import check_writable
from flashgen.launch.call.batched_launch import Found, run
from flashgen.launch.call.prepared import Call, Output, make_call, make_steps, remember, stretch_of
from flashgen.launch.kvcache.append_arguments import DISPLAYED, append_values, check_append
from flashgen.launch.kvcache.cache_arrays import GivenArrays
from flashgen.launch.target import Buffer, Ready, Target
from flashgen.plan.model.plans import Problem, Role
from flashgen.spec import AttentionSpec, KVCache, Rotary

#: The output of rotated queries.
_ROTATED_Q = "rotated_q"
_WRITTEN = ("k", "v")
_TENSORS = ("k", "v", "new_k", "new_v")

#: ``load(device, stream) -> kernels by role``.
Load = Callable[[int, int | None], Mapping[Role, Ready]]


class Appender:
    """Calls of the append kernel of one spec; safe to use from many threads."""

    def __init__(self, spec: AttentionSpec, target: Target, load: Load) -> None:
        self._spec, self._target, self._load = spec, target, load
        self._given_arrays = GivenArrays(spec)
        self._calls: dict[Any, Call] = {}

    def __call__(
        self, k: Any, v: Any, new_k: Any, new_v: Any, cache: KVCache, q: Any, rotary: Rotary | None, stream: Any
    ) -> Any:
        """The queries, rotated if there is a ``rotary``."""
        made = run(self.find(k, v, new_k, new_v, cache, q, rotary, stream), new_k, stream)
        return made[0] if made else q

    def find(
        self, k: Any, v: Any, new_k: Any, new_v: Any, cache: KVCache, q: Any, rotary: Rotary | None, stream: Any
    ) -> Found:
        """The prepared call for these arguments: a remembered one, if there was a call like it."""
        self._target.check()
        names, places = self._given_arrays.of(cache)
        if cache.seqlens is None:
            raise ArgumentError(
                "cache.seqlens=None: new keys are appended to those in the cache; pass how many keys it has"
            )
        arrays, how = (*places, k, v, new_k, new_v), None
        names += _TENSORS
        if rotary is not None:
            if not isinstance(rotary, Rotary):
                raise ArgumentError(f"rotary={show(rotary)} is not a Rotary; pass flashgen.Rotary(cos, sin)")
            how = rotary.interleaved, rotary.one_position
            more, rotated = _rotary_arrays(rotary, q)
            names, arrays = names + more, arrays + rotated
        framework = framework_of(k)
        try:
            signature, pointers = framework.signature(arrays, stream)
        except UNREADABLE as error:
            raise unreadable(_displayed(names), arrays, framework, error) from error
        key = signature, names, how
        call = self._calls.get(key)
        if call is None:
            call = self._prepare(framework, names, arrays, signature, rotary, stream)
            remember(self._calls, key, call)
        return self._target, call, framework, arrays, pointers, ()

    def _prepare(
        self,
        framework: Framework,
        names: tuple[str, ...],
        arrays: tuple[Any, ...],
        signature: Any,
        rotary: Rotary | None,
        stream: Any,
    ) -> Call:
        common_framework(_displayed(names), arrays)
        described = framework.describe(_displayed(names), signature)
        infos = {name: canonical(info) for name, info in zip(names, described, strict=True)}
        check_writable(*(infos[name] for name in _WRITTEN))
        check_append(self._spec, infos, on_host=self._target.on_host)
        q, new_k, device = infos.get("q"), infos["new_k"], infos["k"].device
        outputs = () if q is None else (Output(_ROTATED_Q, q.shape, self._spec.dtype),)
        heads = max(new_k.shape[2], q.shape[2] if q else 0)
        rows = Problem(new_k.shape[0], heads, heads, max(new_k.shape[1], q.shape[1] if q else 0), 0)
        kernels = self._load(device, framework.stream(device, stream))
        values = append_values(self._spec, infos, rotary, outputs)
        steps = make_steps(kernels, ("append",), rows, values, {}, (*names, *(o.name for o in outputs)))
        stretches = self._stretches(infos) if self._target.on_host else None
        return make_call(framework, device, steps, outputs, (), stretches)

    def _stretches(self, infos: Mapping[str, ArrayInfo]) -> list[Buffer]:
        """The memory that the kernel may access."""
        found = []
        for name, info in infos.items():
            item = ARGUMENTS[info.dtype].bytes if info.dtype in ARGUMENTS else 4
            found.append(stretch_of(info, item, writable=name in _WRITTEN))
        return found


def _rotary_arrays(rotary: Rotary, q: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The arrays that rotation reads, by parameter: the tables and, if there is one, q."""
    arrays = {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_positions": rotary.positions, "q": q}
    given = [name for name, array in arrays.items() if array is not None]
    return tuple(given), tuple([arrays[name] for name in given])


def _displayed(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that users know."""
    return tuple(DISPLAYED.get(name, name) for name in names)
