"""``torch.ops.flashgen.cache_append`` and ``.cache_forward``: a cache of keys and values, and attention to it.

Both are for inference, and have no gradients. Lengths and places stay on the device: no call waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.errors import ArgumentError
from flashgen.kernel import Kernel
from flashgen.launch.call.batched_launch import Part, run
from flashgen.launch.call.scales import NO_SCALES as NO_INPUT_SCALES
from flashgen.spec import KVCache, Rotary
from flashgen.spec.attention import CacheKind
from flashgen.torch.kernels import EIGHT_BIT_INPUTS, cached_kernel_for
from flashgen.torch.operators.eight_bits import scale_tensor
from flashgen.torch.operators.library import arguments_by_name, forward_shapes, implement, library
from flashgen.torch.operators.packed_keys import append_packed
from flashgen.torch.program import Program, check_tensors, program_named
from flashgen.torch.replay import RESULTS, CallKey, remember, replayed
from flashgen.torch.scales import NO_SCALES, Scales, out_dtype_of
from flashgen.torch.tensors import needs_dispatcher, rows_contiguous, wants_gradients
from flashgen.torch.tracing.compiled import text_of

#: Where captured tensors are among the arguments of ``cache_forward``.
_CAPTURED = 3
#: Its arguments between ``block_table`` and ``qv``.
_OPTIONS_BEFORE_QV = 9
_PLACES = "Tensor? seqlens=None, Tensor? batch_idx=None, Tensor? leftpad=None, Tensor? block_table=None"
_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None, bool page_scales=False"
library.define(
    "cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, str program, "
    f"{_PLACES}, Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_positions=None, "
    f"bool interleaved=True, bool one_position=False, {_SCALES}) -> Tensor"
)
library.define(
    "cache_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] captured, str program, "
    f"{_PLACES}, int appended=0, int num_splits=0, float? scale=None, Tensor? cu_seqlens_q=None, int max_seqlen_q=0, "
    f"bool batch_invariant=False, {_SCALES}, Tensor? qv=None, Tensor? q_scale=None, ScalarType? out_dtype=None) "
    "-> (Tensor, Tensor)"
)


def attend_to_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache: KVCache,
    program: Program,
    captured: Sequence[Any] = (),
    *,
    k: Any = None,
    v: Any = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    starts_new: Any = None,
    scales: Scales = NO_SCALES,
    qv: Any = None,
    key: CallKey | None = None,
    wanted: Collection[str] = RESULTS,
) -> tuple[Any, Any]:
    """``(out, lse)`` of queries that attend to a cache, into which k and v are put before, where they are given.

    With ``starts_new`` k and v are packed, and those of sequence i begin there. ``scales`` take the place of the
    cache's. The call is remembered by ``key``; later calls return the ``wanted`` results alone.
    """
    cache, page_scales = replace(cache, k_scale=scales.k, v_scale=scales.v), scales.of_pages
    if starts_new is not None or (rotary is not None and cache.cu_seqlens_q is not None):
        text = text_of(program)
        q, cache = append_packed(q, k_cache, v_cache, k, v, cache, rotary, starts_new, text, page_scales)
        k, v, rotary, key = None, None, None, None
    if not torch.compiler.is_compiling():
        inputs = q, k_cache, v_cache, k, v, qv, *captured
        if not (needs_dispatcher(q, k_cache, v_cache) or wants_gradients(*inputs)):
            parts = _attend(q, k_cache, v_cache, cache, program, captured, k, v, rotary, scale, scales, qv)
            if key is not None:
                remember(key, parts, wanted)
            _, (out, lse, *_) = parts[-1]
            return out, lse
    seqlens = cache.seqlens if cache.cu_seqlens_k is None else cache.cu_seqlens_k.diff()
    places = seqlens, cache.batch_idx, cache.leftpad, cache.block_table
    of_cache = cache.k_scale, cache.v_scale, page_scales
    text, appended = text_of(program), cache.appended
    if k is not None:
        angles = (None, None, None) if rotary is None else (rotary.cos, rotary.sin, rotary.positions)
        style = (True, False) if rotary is None else (rotary.interleaved, rotary.one_position)
        turned = torch.ops.flashgen.cache_append(k_cache, v_cache, k, v, q, text, *places, *angles, *style, *of_cache)
        q, appended = q if rotary is None else turned, k.shape[1]
    result: tuple[Any, Any] = torch.ops.flashgen.cache_forward(
        *(q, k_cache, v_cache, list(captured), text, *places, appended),
        *(cache.num_splits, scale, cache.cu_seqlens_q, cache.max_seqlen_q, cache.batch_invariant, *of_cache, qv),
        *(scale_tensor(scales.q, q), scales.out_dtype),
    )
    return result


def put_into_cache(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    program: Program,
    scales: Scales = NO_SCALES,
) -> None:
    """Appends k and v to a cache; a call like one before is replayed. ``scales`` take the place of the cache's."""
    k_scale, v_scale, page_scales = scales[:3]
    places = cache.seqlens, cache.batch_idx, cache.block_table
    key: CallKey = (k, k_cache, v_cache, v, *places, k_scale, v_scale), ("append", program.rule, page_scales)
    if replayed(key) is not None:
        return
    if torch.compiler.is_compiling() or needs_dispatcher(k, k_cache, v_cache) or wants_gradients(k, v):
        where = {"seqlens": cache.seqlens, "batch_idx": cache.batch_idx, "block_table": cache.block_table}
        given = {**where, "k_scale": k_scale, "v_scale": v_scale, "page_scales": page_scales}
        torch.ops.flashgen.cache_append(k_cache, v_cache, k, v, k, text_of(program), **given)
        return
    cache = replace(cache, k_scale=k_scale, v_scale=v_scale)
    kernel = _kernel(k, v_cache, program, cache.block_table, page_scales)
    remember(key, [_put(kernel, k_cache, v_cache, k, v, k, cache, None)], ())


def _attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache: KVCache,
    program: Program,
    captured: Sequence[Any],
    k: Any,
    v: Any,
    rotary: Rotary | None,
    scale: float | None,
    scales: Scales,
    qv: Any,
) -> list[Part]:
    """What the two operators do, without the dispatcher: the calls that it takes, with their results."""
    kernel, parts = _kernel(q, v_cache, program, cache.block_table, scales.of_pages, qv, scales.out_dtype), []
    cache = _with_plain_arrays(cache, cache.appended if k is None else k.shape[1])
    if k is not None:
        parts = [_put(kernel, k_cache, v_cache, k, v, q, cache, rotary)]
        q = _turned(parts[0], q)
    return [*parts, _read(kernel, q, k_cache, v_cache, program, captured, cache, scale, qv, scales.q)]


def _with_plain_arrays(cache: KVCache, appended: int) -> KVCache:
    """The same for so many new keys, with the numbers of each row side by side, as kernels take them."""
    arrays = cache.seqlens, cache.batch_idx, cache.leftpad, cache.block_table, cache.cu_seqlens_q, cache.cu_seqlens_k
    if not appended and all([x is None or x.is_contiguous() for x in arrays]):  # noqa: C419 (takes half the time)
        return cache
    seqlens, rows, leftpad, table, starts, keys = map(_plain, arrays)
    places = {"seqlens": seqlens, "batch_idx": rows, "leftpad": leftpad, "block_table": table}
    return replace(cache, **places, appended=appended, cu_seqlens_q=starts, cu_seqlens_k=keys)


def _put(
    kernel: Kernel, k_cache: Any, v_cache: Any, k: Any, v: Any, q: Any, cache: KVCache, rotary: Rotary | None
) -> Part:
    """Puts k and v into the cache; the result is the queries turned, where there is a ``rotary``."""
    if rotary is not None:
        angles = rows_contiguous(rotary.cos), rows_contiguous(rotary.sin)
        rotary = Rotary(*angles, rotary.interleaved, _plain(rotary.positions), rotary.one_position)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    found = kernel.executor.append.find(k_cache, v_cache, k, v, cache, q, rotary, None)
    return found, run(found, k)


def _turned(part: Part, q: Any) -> Any:
    _, results = part
    return results[0] if results else q


def _read(
    kernel: Kernel,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    program: Program,
    captured: Sequence[Any],
    cache: KVCache,
    scale: float | None,
    qv: Any,
    q_scale: Any,
) -> Part:
    """Queries attend to what is in the cache; the results are out and lse."""
    q, given = rows_contiguous(q), None
    qv = None if qv is None else rows_contiguous(qv)
    if captured:
        check_tensors(program.names, tuple(captured), q.device)
        given = dict(zip(program.names, captured, strict=True))
    scales = NO_INPUT_SCALES if q_scale is None else (q_scale, None, None)
    found = kernel.executor.find_forward(q, k_cache, v_cache, scale, captured=given, cache=cache, qv=qv, scales=scales)
    return found, run(found, q)


def _kernel(
    q: Any,
    v_cache: Any,
    program: Program,
    block_table: Any,
    page_scales: bool,
    qv: Any = None,
    out_dtype: Any = None,
) -> Kernel:
    kind: CacheKind = "contiguous" if block_table is None else "paged"
    more: dict[str, Any] = {"page_scales": page_scales, "has_qv": qv is not None, "out_dtype": out_dtype}
    return cached_kernel_for(q, v_cache, program, kind, **more)


def _plain(x: Any) -> Any:
    return x if x is None or x.is_contiguous() or x.stride()[-1] == 1 else x.contiguous()


def _append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    q: Any,
    program: str,
    seqlens: Any = None,
    batch_idx: Any = None,
    leftpad: Any = None,
    block_table: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_positions: Any = None,
    interleaved: bool = True,
    one_position: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    page_scales: bool = False,
) -> Any:
    places = _plain(seqlens), _plain(batch_idx), None, _plain(block_table)
    cache = KVCache(*places, k_scale=k_scale, v_scale=v_scale)
    kernel = _kernel(q, v_cache, program_named(program), block_table, page_scales)
    if rotary_cos is None:
        _put(kernel, k_cache, v_cache, k, v, q, cache, None)
        # An operator's result is no tensor that it was given.
        return q.new_empty(0)
    rotary = Rotary(rotary_cos, rotary_sin, interleaved, rotary_positions, one_position)
    return _turned(_put(kernel, k_cache, v_cache, k, v, q, cache, rotary), q)


def _forward(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    captured: list[Any],
    program: str,
    seqlens: Any = None,
    batch_idx: Any = None,
    leftpad: Any = None,
    block_table: Any = None,
    appended: int = 0,
    num_splits: int = 0,
    scale: float | None = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int = 0,
    batch_invariant: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    page_scales: bool = False,
    qv: Any = None,
    q_scale: Any = None,
    out_dtype: Any = None,
) -> tuple[Any, Any]:
    places = _plain(seqlens), _plain(batch_idx), _plain(leftpad), _plain(block_table)
    rest = None, batch_invariant, k_scale, v_scale
    cache = KVCache(*places, appended, num_splits, _plain(cu_seqlens_q), max_seqlen_q, *rest)
    named = program_named(program)
    kernel = _kernel(q, v_cache, named, block_table, page_scales, qv, out_dtype)
    _, (out, lse, *_) = _read(kernel, q, k_cache, v_cache, named, captured, cache, scale, qv, q_scale)
    return out, lse


implement("cache_append", _append)
implement("cache_forward", _forward)


def _append_shapes(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    q: Any,
    program: str,
    seqlens: Any = None,
    batch_idx: Any = None,
    leftpad: Any = None,
    block_table: Any = None,
    rotary_cos: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    return q.new_empty(0 if rotary_cos is None else q.shape)


def _forward_shapes(*given: Any, **named: Any) -> tuple[Any, Any]:
    call = arguments_by_name("cache_forward", given, named)
    q = call["q"]
    out, lse = forward_shapes(q, call["v_cache"])
    if q.dtype is EIGHT_BIT_INPUTS:
        out = out.new_empty(out.shape, dtype=out_dtype_of(call["out_dtype"]))
    return out, lse


torch.library.register_fake("flashgen::cache_append", _append_shapes, lib=library)
torch.library.register_fake("flashgen::cache_forward", _forward_shapes, lib=library)


library.define("cache_gradient(Tensor do, Tensor q) -> Tensor")


def _no_gradient(do: Any, q: Any) -> Any:
    raise ArgumentError("attention to a cache has no gradients; train with flashgen.attention or flash_attn_func")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx: Any, do: Any, _: Any) -> Any:
    # An operator, since a compiler asks what gradients would be as soon as there might be any; and one that takes
    # what only a backward pass has, or it would be part of the forward pass.
    (q,) = ctx.saved_tensors
    dq = torch.ops.flashgen.cache_gradient(do, q)
    captured = [None] * len(ctx.needs_input_grad[_CAPTURED]) if ctx.needs_input_grad[_CAPTURED] else []
    return dq, None, None, captured, *(None for _ in ctx.needs_input_grad[_CAPTURED + 1 :])


library.impl("cache_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("flashgen::cache_gradient", lambda do, q: torch.empty_like(q), lib=library)
torch.library.register_autograd("flashgen::cache_forward", _differentiate, setup_context=_keep, lib=library)


@register_flop_formula(torch.ops.flashgen.cache_forward)
def _forward_flops(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    captured: Any,
    program: str,
    seqlens: Any = None,
    batch_idx: Any = None,
    leftpad: Any = None,
    block_table: Any = None,
    *rest: Any,
    out_shape: Any = None,
    **__: Any,
) -> int:
    """Two products over as many keys as there is room for: how many there are is known on the device alone.

    With qv, which comes last, there are three.
    """
    *rows, heads, dim = q
    keys = k_cache[1] * (1 if block_table is None else block_table[1])
    has_qv = len(rest) > _OPTIONS_BEFORE_QV and rest[_OPTIONS_BEFORE_QV] is not None
    return int(2 * math.prod(rows) * heads * keys * (dim + (2 if has_qv else 1) * v_cache[-1]))
