"""flashgen's algorithms as candidates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from flashgen.api import Kernel, build
from flashgen.arch import Arch
from flashgen.errors import CompileError, PlanError
from flashgen.lab.bench.candidate import Call, Candidate, RefusedError
from flashgen.lab.bench.case import Case, Inputs
from flashgen.lab.timing.device import Device
from flashgen.pipeline import TargetName
from flashgen.plan.lineage import LINEAGE
from flashgen.spec import KVCache, Schedule
from flashgen.spec.attention import CacheKind
from flashgen.spec.schedule import ALGORITHMS, Algorithm


def algorithms(names: Iterable[Algorithm] = ALGORITHMS, arch: Arch | None = None) -> tuple[Candidate, ...]:
    """A candidate for each algorithm, by kernels for a GPU's architecture; None means the emulator."""
    return tuple(Candidate(name, partial(_prepare, name, arch)) for name in names)


def decoders(arch: Arch | None = None, page_size: int = 64) -> tuple[Candidate, ...]:
    """Steps with a cache, contiguous and in pages that lie anywhere; None means the emulator.

    ``page_size`` is that of the cases.
    """
    kinds: dict[str, CacheKind] = {"contiguous": "contiguous", f"pages of {page_size}": "paged"}
    return tuple(Candidate(name, partial(_decode, kind, arch)) for name, kind in kinds.items())


def _decode(kind: CacheKind, arch: Arch | None, case: Case, inputs: Inputs, device: Device) -> Call:
    target: TargetName = "emulator" if arch is None else "gpu"
    if case.page_scales and kind != "paged":
        raise RefusedError("scales of pages are for a cache in pages")
    try:
        kernel = build(case.spec_with(kind), arch=arch, target=target)
    except (PlanError, CompileError) as error:
        raise RefusedError(str(error)) from error
    k, v, table, scales = inputs.k, inputs.v, None, None
    if kind == "paged" or case.cache_dtype is not None:
        k, v = (np.asarray(device.get(x)).astype(kernel.plan.spec.cache_element.numpy()) for x in (k, v))
        if kind == "paged":
            each = -(-case.len // case.page_size)
            order = np.random.default_rng(case.len).permutation(case.batch * each).astype(np.int32)
            k, v = (_in_pages(x, order, case.page_size) for x in (k, v))
            table = device.put(order.reshape(case.batch, each))
            scales = device.put(np.ones(len(order), np.float32)) if case.page_scales else None
        k, v = device.put(k), device.put(v)
    lengths = device.put(np.array(case.lengths, np.int32))
    cache = KVCache(lengths, block_table=table, k_scale=scales, v_scale=scales)
    return lambda: kernel(inputs.q, k, v, cache=cache)[:1]


def _in_pages(x: Any, order: Any, page_size: int) -> Any:
    """The keys or values in pages, of which number ``order[i]`` is the i-th in the order of keys."""
    batch, length, *rest = x.shape
    each = len(order) // batch
    padded = np.zeros((batch, each * page_size, *rest), x.dtype)
    padded[:, :length] = x
    pages = np.empty((len(order), page_size, *rest), x.dtype)
    pages[order] = padded.reshape(len(order), page_size, *rest)
    return pages


def _prepare(name: Algorithm, arch: Arch | None, case: Case, inputs: Inputs, device: Device) -> Call:
    kernel = kernel_for(name, case, arch)
    x = inputs
    if case.pass_ == "forward":
        return lambda: kernel(x.q, x.k, x.v)[:1]
    out, lse = kernel(x.q, x.k, x.v)
    return lambda: kernel.backward(x.do, x.q, x.k, x.v, out, lse)


def kernel_for(name: Algorithm, case: Case, arch: Arch | None) -> Kernel:
    """The kernels of a case by an algorithm; a RefusedError where it has none."""
    target: TargetName = "emulator" if arch is None else "gpu"
    try:
        kernel = build(case.spec, Schedule(algorithm=name), arch=arch, target=target)
    except (PlanError, CompileError) as error:
        raise RefusedError(str(error)) from error
    forward, others = kernel.plan.forward, [k for k in kernel.plan.kernels if k.pass_ == "backward"]
    if name in LINEAGE and others and all(k.algorithm != forward.algorithm for k in others):
        raise RefusedError(f"it has no backward pass; gradients come from {others[0].algorithm}")
    return kernel
