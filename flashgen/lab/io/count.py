"""``count_io(spec, len_q, ...)``: the bytes that the kernels of a plan really move, counted on the emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from flashgen import pipeline
from flashgen.arch import Arch
from flashgen.errors import ArgumentError
from flashgen.kernel import Kernel
from flashgen.lab.io.decode import attending_role
from flashgen.lab.io.model import NOTE, sizes_of
from flashgen.lab.io.names import shown
from flashgen.lab.io.planned import planned
from flashgen.lab.io.registry import spec_of_pass
from flashgen.lab.io.sizes import Sizes
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO
from flashgen.lab.text import bytes_text, html_table, table
from flashgen.launch.arrays.array import HOST
from flashgen.plan import plan
from flashgen.plan.cache import DECODE
from flashgen.plan.model.plans import AttentionPlan, Pass
from flashgen.spec import AttentionSpec, Dropout, KVCache, Schedule

if TYPE_CHECKING:
    from flashgen.emulator.traffic import LaunchTraffic
    from flashgen.launch.host import HostTarget

#: The emulator goes through some hundred thousand pairs of a query and a key in a second.
MOST_PAIRS = 2**24
_PAGE_SIZE = 64
_COLUMNS = ("kernel", "array", "read: model", "counted", "written: model", "counted")


@dataclass(frozen=True, slots=True)
class IOCount:
    """What was modeled and what was counted, kernel by kernel; ``str()`` draws them side by side."""

    sizes: Sizes
    model: AlgorithmIO
    counted: AlgorithmIO

    @property
    def error(self) -> float:
        """By how much the model's total differs from the counted one, as a part of that."""
        return abs(self.model.total - self.counted.total) / self.counted.total if self.counted.total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {"model": self.model.as_dict(), "counted": self.counted.as_dict(), "error": self.error}

    @property
    def summary(self) -> str:
        """The totals, in a sentence."""
        claim = "exact" if self.model.exact else "not claimed to be exact"
        return (
            f"total: {self.model.total} bytes by the model ({claim}), {self.counted.total} counted;"
            f" they differ by {100 * self.error:.2f} %"
        )

    def __str__(self) -> str:
        return "\n".join([table(self._cells()), self.summary])

    def _repr_html_(self) -> str:
        return html_table(self._cells(), self.summary)

    def _cells(self) -> Iterable[tuple[str, ...]]:
        yield _COLUMNS
        models = {kernel.name: kernel for kernel in self.model.kernels}
        for counted in self.counted.kernels:
            model = models.get(counted.name, KernelIO(counted.name, {}, {}))
            for array in dict.fromkeys((*model.reads, *model.writes, *counted.reads, *counted.writes)):
                sides = (model.reads, counted.reads, model.writes, counted.writes)
                yield (counted.name, array, *(_cell(side, array) for side in sides))


def _cell(counts: Mapping[str, int], array: str) -> str:
    return bytes_text(counts[array]) if array in counts else "-"


def count_io(
    spec: AttentionSpec,
    len_q: int,
    len_kv: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    arch: str | Arch = "sm_80",
    schedule: Schedule | None = None,
    pass_: Pass = "forward",
    stored_p: bool = False,
    seed: int = 0,
) -> IOCount:
    """Runs the kernels of a plan on the emulator with N(0,1) inputs, and counts what each launch moves.

    ``stored_p``: the backward pass of ``algorithm="standard"`` gets P from the forward pass; otherwise it computes P
    again. The model is that of the kernels that the call launches.

    Loads and stores of C++, cp.async, bulk copies and reductions all count; zeros that a copy fills in do not.
    A reduction or an atomic counts once, as a write. The emulator has no cache, and a GPU may poll flags more or less
    often.
    """
    sizes = sizes_of(spec, len_q, len_kv, batch, heads, heads_kv, None, arch, pass_)
    # A thread of the naive kernel goes through all pairs of a row for one element of O.
    repeats = spec.head_dim_v if schedule is not None and schedule.algorithm == "naive" else 1
    if sizes.pairs * repeats > MOST_PAIRS:
        most, side = MOST_PAIRS // repeats, isqrt(MOST_PAIRS // repeats)
        raise ArgumentError(
            f"{sizes.all_heads} heads of {sizes.len_q} x {sizes.len_kv} scores are {sizes.pairs} pairs, which take the"
            f" emulator minutes; count at most {most}, such as one head of {side} x {side}, and model larger ones"
        )
    if spec.tensors:
        raise ArgumentError(f"{spec.describe()} captures tensors, whose loads the model leaves out; count it without")
    attention = plan(spec_of_pass(sizes), schedule, sizes.arch)
    if spec.cache and attending_role(sizes, attention) != DECODE:
        raise ArgumentError(
            f"{spec.describe()} is counted for calls of the decode kernel alone; count fewer than 64 queries and some"
            " keys in bf16 or fp16, or a spec without a cache"
        )
    if stored_p and not (pass_ == "backward" and attention.stores_probabilities):
        raise ArgumentError(
            "stored_p=True is for the backward pass of a plan that stores P; use pass_='backward' and"
            " schedule=Schedule(algorithm='standard')"
        )
    kernel = Kernel(pipeline.variant(attention, "emulator"), "emulator")
    sizes = replace(sizes, multiprocessors=kernel.target.multiprocessors(HOST))
    launches = _run(kernel, sizes, stored_p, seed)
    counted = AlgorithmIO("counted", tuple(_kernel_io(attention, launch) for launch in launches), exact=True)
    roles = [kernel.name for kernel in counted.kernels]
    return IOCount(sizes, planned("plan", sizes, attention, roles, NOTE), counted)


def _run(kernel: Kernel, sizes: Sizes, stored_p: bool, seed: int) -> list[LaunchTraffic]:
    """Runs a kernel, whose options are nobody else's."""
    import numpy as np

    target: HostTarget = kernel.target  # type: ignore[assignment]
    spec, random = kernel.plan.spec, np.random.default_rng(seed)

    def normal(length: int, heads: int, dim: int) -> Any:
        return random.standard_normal((sizes.batch, length, heads, dim), np.float32).astype(spec.element.numpy())

    q = normal(sizes.len_q, sizes.heads, spec.head_dim)
    k = normal(sizes.len_kv, sizes.heads_kv, spec.head_dim)
    v = normal(sizes.len_kv, sizes.heads_kv, spec.head_dim_v)
    launches: list[LaunchTraffic] = []
    counting = {"traffic": launches}
    target.options = counting if sizes.pass_ == "forward" else {}
    dropout = Dropout(0.1, seed) if spec.dropout else None
    if spec.cache:
        k, v, cache = _in_cache(spec, k, v)
        qv = normal(sizes.len_q, sizes.heads, spec.head_dim_v) if spec.qv else None
        kernel(q, k, v, cache=cache, qv=qv)
        return launches
    out, lse, *p = kernel(q, k, v, dropout=dropout, return_p=stored_p)
    if sizes.pass_ == "backward":
        target.options = counting
        do = normal(sizes.len_q, sizes.heads, spec.head_dim_v)
        kernel.backward(do, q, k, v, out, lse, dropout=dropout, p=p[0] if p else None)
    return launches


def _in_cache(spec: AttentionSpec, k: Any, v: Any) -> tuple[Any, Any, KVCache]:
    """The keys and values in a cache, and what it says of them."""
    import numpy as np

    batch, length = k.shape[:2]
    seqlens = np.full(batch, length, np.int32)
    if spec.cache_dtype:
        k, v = (x.astype(spec.cache_element.numpy()) for x in (k, v))
    if spec.cache == "contiguous":
        return k, v, KVCache(seqlens)
    each = -(-length // _PAGE_SIZE)

    def pages(x: Any) -> Any:
        padded = np.zeros((batch, each * _PAGE_SIZE, *x.shape[2:]), x.dtype)
        padded[:, :length] = x
        return padded.reshape(batch * each, _PAGE_SIZE, *x.shape[2:])

    table = np.arange(batch * each, dtype=np.int32).reshape(batch, each)
    scale = np.ones(batch * each, np.float32) if spec.page_scales else None
    return pages(k), pages(v), KVCache(seqlens, block_table=table, k_scale=scale, v_scale=scale)


def _kernel_io(attention: AttentionPlan, launch: LaunchTraffic) -> KernelIO:
    role = next(kernel.role for kernel in attention.kernels if kernel.name == launch.kernel)
    return KernelIO(role, _by_shown_name(launch.read), _by_shown_name(launch.written))


def _by_shown_name(counts: Mapping[str, int]) -> dict[str, int]:
    named: Counter[str] = Counter()
    for name, count in counts.items():
        named[shown(name)] += count
    return dict(named)
