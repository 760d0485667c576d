"""Checks the arguments of calls of the append kernel, and computes its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, contiguous_strides
from flashgen.launch.call.arguments import check_forward
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import Output
from flashgen.launch.kvcache.cache_arrays import capacity, check_cache, is_ints
from flashgen.launch.kvcache.scales import check_scales, scale_values
from flashgen.plan.cache import cache_arrays
from flashgen.spec import AttentionSpec, Rotary

#: The arguments of arrays whose parameters have other names.
DISPLAYED = {
    "k": "k_cache",
    "v": "v_cache",
    "new_k": "k",
    "new_v": "v",
    "rotary_cos": "rotary.cos",
    "rotary_sin": "rotary.sin",
    "rotary_positions": "rotary.positions",
}
_STRIDED = ("q", "new_k", "new_v", "k", "v", "rotated_q")
Infos = Mapping[str, ArrayInfo]


def check_append(spec: AttentionSpec, infos: Infos, *, on_host: bool) -> None:
    """Raises ArgumentError, which lists everything that is wrong with the arrays."""
    new_k, k = infos["new_k"], infos["k"]
    q = infos.get("q", new_k)
    check_forward(spec, q, k, infos["v"], on_host=on_host)
    check_forward(spec, q, new_k, infos["new_v"], on_host=on_host, cached=False)
    check_cache(_locating_arrays(spec, infos), new_k, k)
    check_scales(spec, _locating_arrays(spec, infos), new_k.shape[0], k)
    problems = list(_problems(infos))
    if "rotary_cos" in infos:
        problems += _angle_problems(infos, capacity(_locating_arrays(spec, infos), k))
    if problems:
        raise ArgumentError("\n".join(problems))


def append_values(
    spec: AttentionSpec, infos: Infos, rotary: Rotary | None, outputs: Sequence[Output]
) -> dict[str | None, Value]:
    """All parameters but the addresses. Strides of missing arrays are 0."""
    q, new_k, k, locating = infos.get("q"), infos["new_k"], infos["k"], _locating_arrays(spec, infos)
    values: dict[str | None, Value] = {
        None: 0,
        "heads_q": q.shape[2] if q else 0,
        "heads_kv": new_k.shape[2],
        "len_q": q.shape[1] if q else 0,
        "len_kv": capacity(locating, k),
        "len_new": new_k.shape[1],
        "page_size": k.shape[1],
        "table_row": next((a.strides[0] for a in locating if a.name == "block_table"), 0),
        **_angle_values(infos, rotary),
        **scale_values(spec, locating),
    }
    strides = {name: info.strides for name, info in infos.items()}
    strides |= {output.name: contiguous_strides(output.shape) for output in outputs}
    for name in _STRIDED:
        of_array = strides.get(name, (0, 0, 0, 0))
        values |= {f"{name}_{axis}": of_array[i] for i, axis in enumerate(("batch", "row", "head"))}
    return values


def _locating_arrays(spec: AttentionSpec, infos: Infos) -> list[ArrayInfo]:
    """The arrays that locate the sequences in the cache."""
    return [infos[name] for name in cache_arrays(spec) if name in infos]


def _angle_values(infos: Infos, rotary: Rotary | None) -> dict[str | None, Value]:
    if rotary is None:
        names = ("rotary_rows", "rotary_dim", "cos_row", "sin_row", "interleaved", "q_advance")
        return dict.fromkeys(names, 0)
    cos, sin = infos["rotary_cos"], infos["rotary_sin"]
    return {
        "rotary_rows": cos.shape[0],
        "rotary_dim": 2 * cos.shape[1],
        "cos_row": cos.strides[0],
        "sin_row": sin.strides[0],
        "interleaved": int(rotary.interleaved),
        "q_advance": int(not rotary.one_position),
    }


def _problems(infos: Infos) -> Iterator[str]:
    """Mismatches of the new keys with the cache and the queries."""
    new_k, k, q = infos["new_k"], infos["k"], infos.get("q")
    if new_k.shape[2] != k.shape[2]:
        yield f"k has {new_k.shape[2]} heads and k_cache has {k.shape[2]}; they must be equal"
    if q and q.shape[0] != new_k.shape[0]:
        yield f"k has batch {new_k.shape[0]} and q has batch {q.shape[0]}; they must be equal"
    if new_k.device != k.device:
        yield f"k is on {new_k.where} and k_cache on {k.where}; put all arguments on one device"


def _angle_problems(infos: Infos, room: int) -> Iterator[str]:
    """Mismatches of the rotary tables with the cache."""
    cos, sin, k, batch = infos["rotary_cos"], infos["rotary_sin"], infos["new_k"], infos["new_k"].shape[0]
    positions = infos.get("rotary_positions")
    if positions and (not is_ints(positions, 1) or positions.shape != (batch,) or positions.device != k.device):
        yield (
            f"{positions.name} is {positions.dtype} of shape {positions.shape} on {positions.where}; pass {batch} "
            "contiguous int32 on the cache's device"
        )
    wrong = [a for a in (cos, sin) if not _is_table(a, k) or a.shape != cos.shape]
    for a in wrong:
        yield (
            f"{a.name} is {a.dtype} of shape {a.shape} on {a.where}; pass (positions, rotary_dim / 2) in {k.dtype} "
            "on the cache's device, with contiguous rows, and both of the same shape"
        )
    if wrong:
        return
    if 2 * cos.shape[1] > k.shape[3]:
        rotated = 2 * cos.shape[1]
        yield f"{cos.name} has shape {cos.shape}, which rotates {rotated} elements; heads have {k.shape[3]}"
    if cos.shape[0] < room:
        yield f"{cos.name} has {cos.shape[0]} positions, and sequences have room for {room} keys; pass as many"


def _is_table(a: ArrayInfo, k: ArrayInfo) -> bool:
    same = a.dtype == k.dtype and a.device == k.device and len(a.shape) == 2
    return same and (a.shape[1] <= 1 or a.strides[1] == 1)
