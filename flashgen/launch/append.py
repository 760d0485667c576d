"""Calls of the append kernel: new keys and values into a cache, and queries turned by their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashgen.errors import ArgumentError
from flashgen.launch.append_arguments import DISPLAYED, append_values, check_append
from flashgen.launch.array import Framework, canonical
from flashgen.launch.cache_arrays import append_order, given_arrays
from flashgen.launch.call import Call, Output, host_buffer, make_steps
from flashgen.launch.frameworks import common_framework
from flashgen.launch.packing import POINTERS
from flashgen.launch.target import Buffer, Ready, Target
from flashgen.plan.model import Problem, Role
from flashgen.spec import AttentionSpec, KVCache, Rotary

#: How many combinations of shapes and strides are remembered.
_CALLS_KEPT = 1024
#: Where queries go.
_TURNED = "rotated_q"
_WRITTEN = ("k", "v", _TURNED)

#: ``load(device, stream) -> kernels by role``.
Load = Callable[[int, int | None], Mapping[Role, Ready]]


class Appender:
    """Calls of the append kernel of one spec; safe to use from many threads."""

    def __init__(self, spec: AttentionSpec, target: Target, load: Load) -> None:
        self._spec, self._target, self._load = spec, target, load
        self._calls: dict[Any, Call] = {}

    def __call__(
        self, k: Any, v: Any, new_k: Any, new_v: Any, cache: KVCache, q: Any, rotary: Rotary | None, stream: Any
    ) -> Any:
        """The queries, turned where there is a ``rotary``."""
        self._target.check()
        arrays = self._arrays(k, v, new_k, new_v, cache, q, rotary)
        names, given = tuple(arrays), tuple(arrays.values())
        framework = common_framework([DISPLAYED.get(name, name) for name in names], given)
        signature, pointers = framework.signature(given, stream)
        key = (names, signature, None if rotary is None else (rotary.interleaved, rotary.one_position))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _CALLS_KEPT:
                self._calls.clear()
            call = self._calls[key] = self._prepare(framework, arrays, rotary, stream)
        handle = framework.stream(call.device, stream)
        turned = [framework.empty(new_k, output.shape, output.dtype, handle) for output in call.outputs]
        if call.steps:
            places = dict(zip(names, pointers, strict=True))
            if turned:
                places[_TURNED] = framework.pointer(turned[0])
            addresses = [places.get(name, 0) for name in (*append_order(self._spec), *POINTERS)]
            buffers = self._buffers(framework, arrays, turned) if self._target.on_host else ()
            self._target.launch(call.steps, call.device, handle, addresses, buffers)
        return turned[0] if turned else q

    def _arrays(
        self, k: Any, v: Any, new_k: Any, new_v: Any, cache: KVCache, q: Any, rotary: Rotary | None
    ) -> dict[str, Any]:
        """The arrays of a call by parameter; q is one only where it is to be turned."""
        names, given = given_arrays(self._spec, cache)
        if cache.seqlens is None:
            raise ArgumentError("cache.seqlens=None: new keys come behind those that are there; say how many these are")
        arrays = dict(zip(names, given, strict=True)) | {"k": k, "v": v, "new_k": new_k, "new_v": new_v}
        if rotary is None:
            return arrays
        optional = {"rotary_positions": rotary.positions, "q": q}
        arrays |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin}
        return arrays | {name: array for name, array in optional.items() if array is not None}

    def _prepare(self, framework: Framework, arrays: Mapping[str, Any], rotary: Rotary | None, stream: Any) -> Call:
        infos = {name: canonical(framework.describe(DISPLAYED.get(name, name), x)) for name, x in arrays.items()}
        check_append(self._spec, infos, on_host=self._target.on_host)
        q, new_k, device = infos.get("q"), infos["new_k"], infos["k"].device
        outputs = () if q is None else (Output(_TURNED, q.shape, self._spec.dtype),)
        heads = max(new_k.shape[2], q.shape[2] if q else 0)
        rows = Problem(new_k.shape[0], heads, heads, max(new_k.shape[1], q.shape[1] if q else 0), 0)
        kernels = self._load(device, framework.stream(device, stream))
        values = append_values(self._spec, infos, rotary, outputs)
        return Call(device, make_steps(kernels, ("append",), rows, values, {}), outputs)

    def _buffers(self, framework: Framework, arrays: Mapping[str, Any], turned: Sequence[Any]) -> tuple[Buffer, ...]:
        """What the emulator may let the kernel touch."""
        found = []
        for name, array in (*arrays.items(), *((_TURNED, x) for x in turned)):
            info = canonical(framework.describe(name, array))
            item = self._spec.element.bytes if info.dtype == self._spec.dtype else 4
            found.append(host_buffer(info, item, writable=name in _WRITTEN))
        return tuple(found)
