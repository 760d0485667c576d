"""The description of a mask and of its kernels, as numbers and words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

from flashgen.common.html import element, markup
from flashgen.explanation.decoding import decode_lines, decode_numbers
from flashgen.explanation.drawing import flop, labeled, percent, text_map, wrapped
from flashgen.explanation.kinds import EMPTY, FULL, PARTIAL
from flashgen.explanation.svg import COLORS, Bins, tile_map
from flashgen.plan.model.choices import choice_lines, choice_plain
from flashgen.plan.model.plans import KernelPlan
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Fallback:
    """A forward kernel that takes the place of the planned one, and when it does."""

    when: str
    kernel: KernelPlan


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Which tiles of one head's score matrix are empty, partial or full; ``str()`` draws the map.

    ``kinds[i, j]`` is EMPTY, PARTIAL or FULL (0, 1, 2) for tile i of queries and tile j of keys. Empty tiles are
    skipped, and kernels test no pair of full tiles.
    """

    spec: AttentionSpec
    #: The architecture whose plan this is.
    arch: str
    len_q: int
    len_kv: int
    tile_q: int
    tile_kv: int
    batch: int
    head: int
    kinds: NDArray[np.uint8]
    #: The mask, the score and the sink as text; a score or a sink that there is not is empty.
    mask: str
    score: str
    #: Bounds of the loops, as text over ``q_lo q_hi`` or ``k_lo k_hi``: the first and last rows of a tile.
    key_begin: str
    key_end: str
    query_begin: str
    query_end: str
    #: Whether those bounds alone find the tiles, forward and backward; otherwise each tile between them is tested.
    closed: bool
    #: The algorithm of the forward kernel; empty where only a mask is explained, which has no kernel.
    algorithm: str
    #: Why that is not FlashAttention-3, in a clause; None where it is, or where the GPU is none that has it.
    why_not_fa3: str | None
    #: The same of the backward kernels; empty where there are none.
    backward_algorithm: str
    backward_why_not_fa3: str | None
    #: The forward kernel; None where only a mask is explained.
    forward_kernel: KernelPlan | None
    #: Those of the backward kernels that multiply: how their work is cut, what that takes of a block, and why.
    backward_kernels: tuple[KernelPlan, ...]
    #: What may run in the forward kernel's place, in the order of the plan. Only a build finds out whether it does.
    fallbacks: tuple[Fallback, ...]
    width: int = field(default=80, repr=False)

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return int(self.kinds.size)

    @property
    def empty(self) -> int:
        """Tiles that the rule proves to hold no allowed pair; kernels skip them."""
        return self._count(EMPTY)

    @property
    def partial(self) -> int:
        """Tiles in which kernels test every pair."""
        return self._count(PARTIAL)

    @property
    def full(self) -> int:
        """Tiles in which every pair is allowed."""
        return self._count(FULL)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass of this head: two products over the tiles not skipped."""
        import numpy as np

        rows = np.minimum(np.arange(1, self.kinds.shape[0] + 1) * self.tile_q, self.len_q)
        columns = np.minimum(np.arange(1, self.kinds.shape[1] + 1) * self.tile_kv, self.len_kv)
        heights, widths = np.diff(rows, prepend=0), np.diff(columns, prepend=0)
        pairs = int(heights @ ((self.kinds != EMPTY) @ widths)) if self.tiles else 0
        return pairs * self._flops_per_pair

    @property
    def dense_flops(self) -> int:
        """The same for every tile."""
        return self.len_q * self.len_kv * self._flops_per_pair

    @property
    def _flops_per_pair(self) -> int:
        return 2 * (self.spec.score_dim + self.spec.head_dim_v)

    @property
    def _decode_numbers(self) -> dict[str, int]:
        return decode_numbers(self.forward_kernel, self.kinds, self.len_q, self.len_kv, self.tile_kv)

    def _count(self, kind: int) -> int:
        return int((self.kinds == kind).sum())

    def as_dict(self) -> dict[str, Any]:
        """The numbers and texts as plain values; the map is left out."""
        sizes = ("arch", "len_q", "len_kv", "tile_q", "tile_kv", "batch", "head")
        counts = ("tiles", "empty", "partial", "full", "flops", "dense_flops", "closed")
        texts = ("mask", "score", "key_begin", "key_end", "query_begin", "query_end")
        kernels = ("algorithm", "why_not_fa3", "backward_algorithm", "backward_why_not_fa3")
        plain = {name: getattr(self, name) for name in (*sizes, *counts, *texts, *kernels)}
        forward = None if self.forward_kernel is None else choice_plain(self.forward_kernel)
        return (
            plain
            | self._decode_numbers
            | {
                "forward_kernel": forward,
                "backward_kernels": [choice_plain(kernel) for kernel in self.backward_kernels],
                "fallbacks": [
                    {"when": each.when, "algorithm": each.kernel.algorithm, **choice_plain(each.kernel)}
                    for each in self.fallbacks
                ],
            }
        )

    def __str__(self) -> str:
        lines = [*self._work_lines(), *self._kernel_lines()]
        if self.tiles:
            lines += ["", *text_map(self.kinds, self.tile_q, self.tile_kv, self.width)]
        return "\n".join(lines)

    def html(self) -> str:
        """A page of HTML that needs no network: the tile map, the plan, shared memory, reasons, and an estimator."""
        # The laboratory draws it, which lies above: taken from the public package, as users take it.
        import flashgen

        return flashgen.lab.html_page(self)

    def _repr_html_(self) -> str:
        parts: list[Element | str] = [element("p", element("strong", self.mask))]
        if self.tiles:
            bins = Bins.of(self.kinds, (self.tile_q, self.tile_kv), (self.len_q, self.len_kv), most=32)
            parts += [tile_map(bins, titles=True), element("p", f"{bins.scale()} {COLORS}")]
        return markup(element("div", *parts, element("pre", "\n".join([*self._work_lines(), *self._kernel_lines()]))))

    def _work_lines(self) -> Iterator[str]:
        """The mask and the score, and how much of the score matrix is computed."""
        yield labeled("mask", self.mask)
        if self.score:
            yield labeled("score", self.score)
        rows, columns = self.kinds.shape
        yield labeled("tiles", f"{rows} x {columns} of {self.tile_q} queries by {self.tile_kv} keys")
        where = f"batch {self.batch}, head {self.head}"
        yield labeled("", f"{where}, {self.len_q} queries, {self.len_kv} keys")
        kinds = ((self.empty, "skipped"), (self.partial, "partial"), (self.full, "full"))
        yield labeled("", ", ".join(f"{n} {name} ({percent(n, self.tiles)})" for n, name in kinds))
        share = percent(self.flops, self.dense_flops)
        yield labeled("work", f"{flop(self.flops)} of {flop(self.dense_flops)} dense ({share}), forward, one head")
        yield labeled("keys", f"from {self.key_begin}")
        yield labeled("", f"to before {self.key_end}")
        yield labeled("queries", f"from {self.query_begin}")
        yield labeled("", f"to before {self.query_end}")

    def _kernel_lines(self) -> Iterator[str]:
        """How kernels find the tiles, and how their work is cut."""
        how = "by these bounds alone" if self.closed else "by these bounds, and a test of each tile between them"
        yield labeled("found", how)
        if self.algorithm:
            yield labeled("kernel", f"{self.algorithm} for {self.arch}")
        if self.why_not_fa3 is not None:
            yield labeled("", f"not FlashAttention-3: {self.why_not_fa3}")
        if self.backward_algorithm:
            yield labeled("", f"backward: {self.backward_algorithm}")
        if self.backward_why_not_fa3 is not None:
            yield labeled("", f"not FlashAttention-3: {self.backward_why_not_fa3}")
        forward = () if self.forward_kernel is None else (self.forward_kernel,)
        yield from decode_lines(self._decode_numbers)
        for kernel in (*forward, *self.backward_kernels):
            yield from wrapped(kernel.role, choice_lines(kernel), self.width)
        for fallback in self.fallbacks:
            sizes = "tile_q {tile_q}, tile_kv {tile_kv}".format(**choice_plain(fallback.kernel))
            yield from wrapped("else", [f"{fallback.kernel.algorithm}, {sizes}: {fallback.when}"], self.width)
