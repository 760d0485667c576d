"""Calls of the append kernel: new keys and values into a cache, and queries turned by their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flashgen.errors import ArgumentError
from flashgen.launch.arguments import check_forward
from flashgen.launch.array import ArrayInfo, Framework, canonical, contiguous_strides
from flashgen.launch.cache_arrays import append_order, capacity, check_cache, given_arrays
from flashgen.launch.call import Call, Output, host_buffer, make_steps
from flashgen.launch.frameworks import common_framework
from flashgen.launch.packing import POINTERS, Value
from flashgen.launch.target import Buffer, Ready, Target
from flashgen.plan.cache import cache_arrays
from flashgen.plan.model import Problem, Role
from flashgen.spec import AttentionSpec, KVCache, Rotary

_CALLS_KEPT = 1024
_STRIDED = ("q", "new_k", "new_v", "k", "v", "rotated_q")
_NAMES = {"rotary_positions": "rotary.positions", "rotary_cos": "rotary.cos", "rotary_sin": "rotary.sin"}

#: ``load(device, stream) -> kernels by role``.
Load = Callable[[int, int | None], Mapping[Role, Ready]]


class Appender:
    """Calls of the append kernel of one spec."""

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
        framework = common_framework(names, given)
        signature, pointers = framework.signature(given, stream)
        key = (names, signature, None if rotary is None else (rotary.interleaved, rotary.one_position))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _CALLS_KEPT:
                self._calls.clear()
            call = self._calls[key] = self._prepare(framework, arrays, rotary, stream)
        handle = framework.stream(call.device, stream)
        turned = [framework.empty(new_k, o.shape, o.dtype, handle) for o in call.outputs]
        if call.steps:
            at = dict(zip(names, pointers, strict=True)) | {"rotated_q": framework.pointer(x) for x in turned}
            addresses = [at.get(name, 0) for name in (*append_order(self._spec), *POINTERS)]
            buffers = self._buffers(framework, arrays, turned) if self._target.on_host else ()
            self._target.launch(call.steps, call.device, handle, addresses, buffers)
        return turned[0] if turned else q

    def _arrays(
        self, k: Any, v: Any, new_k: Any, new_v: Any, cache: KVCache, q: Any, rotary: Rotary | None
    ) -> dict[str, Any]:
        """The arrays of a call by name; q is one only where it is to be turned."""
        names, given = given_arrays(self._spec, cache)
        arrays = dict(zip(names, given, strict=True)) | {"k": k, "v": v, "new_k": new_k, "new_v": new_v}
        if cache.seqlens is None:
            raise ArgumentError("cache.seqlens=None: new keys come behind those that are there; say how many these are")
        if rotary is not None:
            arrays |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin}
            arrays |= {} if rotary.positions is None else {"rotary_positions": rotary.positions}
            arrays |= {} if q is None else {"q": q}
        return arrays

    def _prepare(self, framework: Framework, arrays: Mapping[str, Any], rotary: Rotary | None, stream: Any) -> Call:
        spec = self._spec
        infos = {name: canonical(framework.describe(name, x)) for name, x in arrays.items()}
        new_k, k = infos["new_k"], infos["k"]
        beside = [infos[name] for name in cache_arrays(spec) if name in infos]
        check_forward(spec, infos.get("q", new_k), k, infos["v"], on_host=self._target.on_host)
        check_forward(spec, infos.get("q", new_k), new_k, infos["new_v"], on_host=self._target.on_host)
        check_cache(beside, new_k, k)
        problems = list(_problems(infos, beside))
        if problems:
            raise ArgumentError("\n".join(problems))
        q = infos.get("q")
        outputs = () if q is None else (Output("rotated_q", q.shape, spec.dtype),)
        values = _values(infos, beside, rotary, outputs)
        heads = max(new_k.shape[2], q.shape[2] if q else 0)
        rows = Problem(new_k.shape[0], heads, heads, max(new_k.shape[1], q.shape[1] if q else 0), 0)
        kernels = self._load(k.device, framework.stream(k.device, stream))
        return Call(k.device, make_steps(kernels, ("append",), rows, values, {}), outputs)

    def _buffers(self, framework: Framework, arrays: Mapping[str, Any], turned: Sequence[Any]) -> tuple[Buffer, ...]:
        """What the emulator may let the kernel touch."""
        found = []
        for name, array in (*arrays.items(), *(("rotated_q", x) for x in turned)):
            info = canonical(framework.describe(name, array))
            item = self._spec.element.bytes if info.dtype == self._spec.dtype else 4
            found.append(host_buffer(info, item, writable=name in ("k", "v", "rotated_q")))
        return tuple(found)


def _values(
    infos: Mapping[str, ArrayInfo], beside: Sequence[ArrayInfo], rotary: Rotary | None, outputs: Sequence[Output]
) -> dict[str | None, Value]:
    """All parameters but the addresses; strides of what is not there mean nothing."""
    q, new_k, k = infos.get("q"), infos["new_k"], infos["k"]
    cos, sin = infos.get("rotary_cos"), infos.get("rotary_sin")
    values: dict[str | None, Value] = {
        None: 0,
        "heads_q": q.shape[2] if q else 0,
        "heads_kv": new_k.shape[2],
        "len_q": q.shape[1] if q else 0,
        "len_kv": capacity(beside, k),
        "len_new": new_k.shape[1],
        "page_size": k.shape[1],
        "table_row": next((a.strides[0] for a in beside if a.name == "block_table"), 0),
        "rotary_rows": cos.shape[0] if cos else 0,
        "rotary_dim": 2 * cos.shape[1] if cos else 0,
        "cos_row": cos.strides[0] if cos else 0,
        "sin_row": sin.strides[0] if sin else 0,
        "interleaved": int(rotary is not None and rotary.interleaved),
        "q_advance": int(rotary is not None and not rotary.one_position),
    }
    strides = {name: info.strides for name, info in infos.items()}
    strides |= {o.name: contiguous_strides(o.shape) for o in outputs}
    for name in _STRIDED:
        values |= dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), strides.get(name, (0, 0, 0, 0)), strict=False))
    return values


def _problems(infos: Mapping[str, ArrayInfo], beside: Sequence[ArrayInfo]) -> Iterator[str]:
    """How new keys, caches and the table of angles fit each other."""
    new_k, k = infos["new_k"], infos["k"]
    if new_k.shape[2] != k.shape[2]:
        yield f"new k has {new_k.shape[2]} heads, and the cache has {k.shape[2]}; they must be equal"
    if "q" in infos and infos["q"].shape[0] != new_k.shape[0]:
        yield f"new k has batch {new_k.shape[0]}, and q has batch {infos['q'].shape[0]}; they must be equal"
    if (positions := infos.get("rotary_positions")) is not None:
        known = positions.dtype.rpartition(".")[2] == "int32" and positions.shape == (new_k.shape[0],)
        if not known or positions.device != k.device or (positions.shape[0] > 1 and positions.strides != (1,)):
            yield f"rotary.positions is {positions.dtype} of shape {positions.shape} on {positions.where}; pass {new_k.shape[0]} integers of 32 bits, side by side, where q is"
    if "rotary_cos" in infos:
        yield from _angle_problems(infos, capacity(beside, k))


def _angle_problems(infos: Mapping[str, ArrayInfo], room: int) -> Iterator[str]:
    cos, k = infos["rotary_cos"], infos["k"]
    for name in ("rotary_cos", "rotary_sin"):
        a = infos[name]
        if a.dtype != k.dtype or a.device != k.device or len(a.shape) != 2 or a.shape != cos.shape or (a.shape[1] > 1 and a.strides[1] != 1):
            yield (
                f"{_NAMES[name]} is {a.dtype} of shape {a.shape} on {a.where}; pass (positions, rotary_dim / 2) in {k.dtype} "
                "where the cache is, both of one shape, the elements of a row side by side"
            )
            return
    if 2 * cos.shape[1] > k.shape[3]:
        yield f"rotary.cos has shape {cos.shape}, for {2 * cos.shape[1]} elements of each head; heads have {k.shape[3]}"
    if cos.shape[0] < room:
        yield f"rotary.cos has {cos.shape[0]} positions, and sequences have room for {room} keys; pass as many"
