"""Both passes of a kernel on NumPy arrays, wherever the kernel runs: what a verification calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from flashgen.launch.copies.arrays import to_device, to_host
from flashgen.launch.copies.captured_copy import CapturedCopy
from flashgen.plan.model.params import INPUT_SCALES
from flashgen.plan.varlen import COUNTS, STARTS

#: ``run(q, k, v, do, scale, ...) -> (o, lse, dq, dk, dv)``, as ``flashgen.verify`` calls it.
Run: TypeAlias = Callable[..., Sequence[Any]]
#: Arrays of a cache.
_OF_CACHE = ("seqlens", "batch_idx", "leftpad", "block_table", "k_scale", "v_scale")


def runner(kernel: Any, ordinal: int | None) -> Run:
    """Both passes of a kernel on NumPy arrays: on a GPU, or for None on the emulator."""
    return partial(_run_on_host, kernel) if ordinal is None else partial(_run_on_gpu, kernel, ordinal)


Captured = Mapping[str, Any] | None


def _run_on_host(
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    scale: float,
    captured: Captured = None,
    dlse: Any = None,
    **more: Any,
) -> Sequence[Any]:
    out, lse = kernel(q, k, v, scale=scale, captured=captured, **more)
    if do is None:
        return out, lse
    return out, lse, *kernel.backward(do, q, k, v, out, lse, scale=scale, captured=captured, dlse=dlse, **more)


def _run_on_gpu(
    kernel: Any,
    ordinal: int,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    scale: float,
    captured: Captured = None,
    dlse: Any = None,
    **more: Any,
) -> Sequence[Any]:
    q, k, v, do, dlse = (x if x is None else to_device(x, ordinal) for x in (q, k, v, do, dlse))
    if "qv" in more:
        more["qv"] = to_device(more["qv"], ordinal)
    captured = {name: CapturedCopy(x, ordinal) for name, x in (captured or {}).items()}
    for option, names in (("sequences", (*STARTS, *COUNTS)), ("cache", _OF_CACHE)):
        if option in more:
            arrays = {name: getattr(more[option], name) for name in names}
            copies = {name: CapturedCopy(x, ordinal) for name, x in arrays.items() if x is not None}
            more[option] = replace(more[option], **copies)
    more |= {name: CapturedCopy(more[name], ordinal) for name in INPUT_SCALES if hasattr(more.get(name), "shape")}
    return [to_host(x) for x in _run_on_host(kernel, q, k, v, do, scale, captured, dlse, **more)]
