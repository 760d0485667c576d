"""Names of kernels that a schedule or an alignment changes, e.g. ``forward_d64_causal_q64_stages1_sm80``.

Kernels of one spec have the same name only if they have the same source. Otherwise an override file for one kernel
would replace both, although their shared memory and parameter structs may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from flashgen.plan.model.naming import name_with
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

_ALGORITHMS = {"FlashAttention-2": "fa2", "FlashAttention-3": "fa3"}
#: What a schedule sets, in the order of the words in a name.
_SIZES = {
    "tile_q": "q",
    "tile_kv": "kv",
    "stages": "stages",
    "warps": "warps",
    "consumers": "consumers",
    "producer_registers": "producer",
    "consumer_registers": "consumer",
}


def with_differences_in_names(made: AttentionPlan, defaults: Iterable[KernelPlan]) -> AttentionPlan:
    """The plan, in which a kernel that differs from its namesake in ``defaults`` has the differences in its name."""
    namesakes = {kernel.name: kernel for kernel in defaults}
    kernels = (_renamed(kernel, _differences(kernel, namesakes.get(kernel.name))) for kernel in made.kernels)
    return replace(made, kernels=tuple(kernels))


def _without_notes(kernel: KernelPlan) -> KernelPlan:
    """The kernel without what its source does not depend on."""
    return replace(kernel, schedule=None, reasons=(), access_bytes=0, algorithm="", choice=None)


def _renamed(kernel: KernelPlan, words: Iterable[str]) -> KernelPlan:
    suffix = "_".join(words)
    return replace(kernel, name=name_with(kernel.name, suffix)) if suffix else kernel


def _differences(kernel: KernelPlan, default: KernelPlan | None) -> Iterator[str]:
    """Words for how a kernel differs from the default one; if there is no default one, for all that it could."""
    if default is not None and _without_notes(kernel) == _without_notes(default):
        return
    own, others = _sizes(kernel), _sizes(default) if default is not None else {}
    # A survey has no tiles, and no algorithm.
    if "q" in own and kernel.algorithm in _ALGORITHMS and (default is None or default.algorithm != kernel.algorithm):
        yield _ALGORITHMS[kernel.algorithm]
    yield from (f"{word}{size}" for word, size in own.items() if others.get(word) != size)


def _sizes(kernel: KernelPlan) -> Mapping[str, int]:
    config = {constant.name: constant.value for constant in kernel.config}
    sizes = {word: int(config[name]) for name, word in _SIZES.items() if name in config}
    if kernel.expressions is not None and kernel.expressions.tables:
        # The narrowest tile of all kernels decides, so this depends on the schedule of either pass.
        sizes["stretch"] = kernel.expressions.stretch
    return sizes
