"""``explain(spec)``: which tiles a mask leaves out, and what it costs: from the rule that kernels follow, drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flashgen.arch import DEFAULT_ARCHS, EIGHT_BIT_ARCHS, Arch, get_arch
from flashgen.common.checks import is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError, NoGpuError, PlanError, SpecError
from flashgen.explanation.kinds import EMPTY, FULL, PARTIAL, kinds_of_tiles
from flashgen.explanation.model import Explanation, Fallback
from flashgen.plan import AttentionPlan, KernelPlan, Problem, plan
from flashgen.plan.algorithm import why_not_fa3
from flashgen.plan.cache import DECODE, PREFILL
from flashgen.plan.cached_calls import CachedCall, attending_kernel
from flashgen.plan.fallbacks import access_without_maps, fallbacks, for_alignment
from flashgen.spec import AttentionSpec, Mask, Schedule

__all__ = ["DEFAULT_LENGTH", "EMPTY", "FULL", "PARTIAL", "Explanation", "explain"]

#: Lengths where neither the caller nor a captured tensor names any.
DEFAULT_LENGTH = 1024
#: Calls that no page size and no left pad keeps from any kernel.
_USUAL = CachedCall()
#: What is drawn for a kernel without tiles.
WITHOUT_TILES = (16, 16)


def explain(
    spec: AttentionSpec | Mask | Callable[..., Any],
    len_q: int | None = None,
    len_kv: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    tile: tuple[int, int] | None = None,
    captured: Mapping[str, Any] | None = None,
    width: int = 80,
    arch: str | Arch | None = None,
    schedule: Schedule | None = None,
    decode: bool = False,
) -> Explanation:
    """Which tiles of one head's score matrix a spec's mask skips; nothing is evaluated pair by pair.

    ``spec`` may be a mask alone, or a function of b, h, q and k. Lengths that are left out are those of the
    captured tensors where they tell, else 1024. ``tile`` is (queries, keys) and by default the plan's for
    ``arch`` and ``schedule``. ``arch=None`` means the current GPU's, as for ``build``; without a GPU it means sm_80.
    The explanation names the kernels that may take the forward kernel's place. ``captured`` gives tensors by name in
    place of those that the mask was made with.

    With a cache, ``len_q`` and ``len_kv`` decide which kernel a call runs, and that one is explained. ``decode=True``
    explains the decode kernel for any lengths. For a decode kernel the explanation says what it reads of each key/value
    head, and among how many blocks it can split that.
    """
    if schedule is not None and not isinstance(schedule, Schedule):
        raise SpecError(f"schedule={show(schedule)} is not a Schedule; write Schedule(tile_q=128), or leave it out")
    if tile is not None and not (isinstance(tile, tuple) and len(tile) == 2):
        raise ArgumentError(
            f"tile={show(tile)} is not a pair of queries and keys; write tile=(64, 64), or leave it out"
        )
    arch = get_arch(arch) if arch is not None else _arch_here(spec)
    if decode:
        _check_decode(spec, schedule, arch)
    has_kernels = isinstance(spec, AttentionSpec)
    backward = _backward(spec, schedule, arch) if isinstance(spec, AttentionSpec) else ()
    main = backward[0] if backward else None
    if not isinstance(spec, AttentionSpec):
        spec = AttentionSpec(64, mask=Mask.of(spec))
    attention = plan(replace(spec, direction="forward"), schedule, arch)
    values = _captured(spec, {} if captured is None else captured)
    sizes = _sizes(spec, values)
    len_q = sizes.get("q", len_kv if is_whole(len_kv, 1, 2**30) else DEFAULT_LENGTH) if len_q is None else len_q
    len_kv = sizes.get("k", len_q) if len_kv is None else len_kv
    for name, number, least in (
        ("len_q", len_q, 0),
        ("len_kv", len_kv, 0),
        ("tile queries", 1 if tile is None else tile[0], 1),
        ("tile keys", 1 if tile is None else tile[1], 1),
        ("batch", batch, 0),
        ("head", head, 0),
        ("width", width, 20),
    ):
        if not is_whole(number, least, 2**30):
            raise ArgumentError(f"{name}={show(number)} is out of range; use a whole number from {least} to 2**30")
    kernel = attention.kernel(DECODE) if decode else _attending(attention, len_q, len_kv)
    tile_q, tile_kv = _tile(kernel) if tile is None else tile
    from flashgen.expr import text

    rule = spec.mask.rule
    env = values | {"b": batch, "h": head, "q_len": len_q, "k_len": len_kv}
    return Explanation(
        spec=spec,
        arch=arch.name,
        len_q=len_q,
        len_kv=len_kv,
        tile_q=tile_q,
        tile_kv=tile_kv,
        batch=batch,
        head=head,
        kinds=kinds_of_tiles(spec.mask, len_q, len_kv, tile_q, tile_kv, env),
        mask=spec.mask.describe(),
        score="" if spec.score is None else spec.score.describe(),
        key_begin=text(rule.key_begin),
        key_end=text(rule.key_end),
        query_begin=text(rule.query_begin),
        query_end=text(rule.query_end),
        closed=rule.hull_exact,
        algorithm=kernel.algorithm if has_kernels else "",
        why_not_fa3=why_not_fa3(kernel) if has_kernels else None,
        backward_algorithm=main.algorithm if main else "",
        backward_why_not_fa3=why_not_fa3(main) if main else None,
        forward_kernel=kernel if has_kernels else None,
        backward_kernels=backward,
        fallbacks=_fallbacks(attention, kernel, len_q, len_kv) if has_kernels and not decode else (),
        width=width,
    )


def _arch_here(spec: object) -> Arch:
    from flashgen.launch.driver.cuda import current_arch

    try:
        return current_arch()
    except NoGpuError:
        is_eight_bit = isinstance(spec, AttentionSpec) and spec.multiplies_eight_bits
        return get_arch((EIGHT_BIT_ARCHS if is_eight_bit else DEFAULT_ARCHS)[0])


def _attending(attention: AttentionPlan, len_q: int, len_kv: int, call: CachedCall = _USUAL) -> KernelPlan:
    """The forward kernel of a call."""
    if attention.spec.cache is None:
        return attention.forward
    return attending_kernel(attention, Problem(1, 1, 1, len_q, len_kv), call)


def _check_decode(spec: object, schedule: Schedule | None, arch: Arch) -> None:
    """ArgumentError for what has no decode kernel."""
    attention = plan(spec, schedule, arch) if isinstance(spec, AttentionSpec) and spec.cache else None
    if attention is None or not attention.has("decode"):
        raise ArgumentError(
            "decode=True needs a spec that has a decode kernel; use AttentionSpec(cache='paged') or 'contiguous' in "
            "bf16 or fp16, without a schedule, for sm_80 or later"
        )


def _fallbacks(attention: AttentionPlan, kernel: KernelPlan, len_q: int, len_kv: int) -> tuple[Fallback, ...]:
    """The forward kernels that may take this one's place, and when."""
    found = []

    def add(when: str, other: KernelPlan) -> None:
        if other != kernel and Fallback(when, other) not in found:
            found.append(Fallback(when, other))

    for each in fallbacks(attention):
        add("if the assembler has too few registers for the kernel above", _attending(each, len_q, len_kv))
    spec = attention.spec
    if kernel.role == PREFILL:
        pages = (
            ", with a left pad, or with pages of a size that is not a multiple of 8" if spec.cache == "paged" else ""
        )
        add(f"with num_splits{pages}", _attending(attention, len_q, len_kv, CachedCall(splits=2)))
        add("with batch_invariant", _attending(attention, len_q, len_kv, CachedCall(batch_invariant=True)))
    if kernel.boxes:
        # The copy engine needs full alignment.
        when, access = "for arguments that are not aligned to 16 bytes", spec.element.bytes
        if spec.cache:
            when, access = "for arguments that are aligned to 8 bytes", access_without_maps(attention)
        if kernel.role == DECODE and spec.cache == "paged":
            when += ", for a left pad, and for pages of one key"
        add(when, _attending(for_alignment(attention, access), len_q, len_kv))
    return tuple(found)


def _backward(spec: AttentionSpec, schedule: Schedule | None, arch: Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels with products that would be built, that of keys first; none where none can be planned."""
    if not spec.needs_backward:
        return ()
    try:
        kernels = plan(spec, schedule, arch).kernels
    except PlanError:
        return ()
    return tuple(kernel for kernel in kernels if kernel.pass_ == "backward" and kernel.role in ("main", "query"))


def _tile(kernel: KernelPlan) -> tuple[int, int]:
    if not kernel.has_tiles:
        return WITHOUT_TILES
    return int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))


def _captured(spec: AttentionSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name for all that the mask captured."""
    from flashgen.expr import is_masked
    from flashgen.spec.text.declared import Declared

    if not isinstance(given, Mapping):
        raise ArgumentError(f"captured={show(given)} is not a dictionary; pass captured={{'name': tensor}}")
    mask = spec.mask.traced
    unknown = [name for name in given if name not in {**spec.tensors, **spec.scalars}]
    if unknown:
        known = ", ".join([*spec.tensors, *spec.scalars]) or "nothing"
        raise ArgumentError(f"captured={{{show(unknown[0])}: ...}} is not captured; this spec captured {known}")
    values = {name: given.get(name, value) for name, value in {**mask.scalars, **mask.tensors}.items()}
    for name in given:
        if is_masked(given[name]):
            raise ArgumentError(f"captured[{name!r}] is a masked array, whose mask kernels do not see; fill it first")
    missing = [name for name, value in values.items() if isinstance(value, Declared)]
    if missing:
        raise SpecError(f"the captured tensor {missing[0]} has no value; pass captured={{{missing[0]!r}: tensor}}")
    return values


def _sizes(spec: AttentionSpec, values: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that captured tensors tell: those of dimensions that q or k alone indexes."""
    from flashgen.expr import Index, Load, postorder

    sizes: dict[str, int] = {}
    for node in postorder(spec.mask.traced.root):
        if isinstance(node, Load):
            for index, size in zip(node.indices, values[node.tensor.name].shape, strict=True):
                if isinstance(index, Index):
                    sizes[index.name] = min(int(size), sizes.get(index.name, int(size)))
    return sizes
