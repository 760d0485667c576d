"""``explain(spec)``: which tiles a mask leaves out, and what it costs: from the rule that kernels follow, drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flashgen.errors import ArgumentError, SpecError
from flashgen.spec import AttentionSpec, Mask, Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flashgen.arch import Arch
    from flashgen.plan.model import KernelPlan

EMPTY, PARTIAL, FULL = 0, 1, 2
SYMBOLS = ".+#"
#: A map of more tiles than this would fill the memory, and say no more than a coarser one.
MOST_TILES = 2**26
#: Lengths where neither the caller nor a captured tensor names any.
DEFAULT_LENGTH = 1024
_LABEL = 8
_ROWS = 32
#: How many tiles are evaluated at a time.
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What becomes of each tile of the score matrix of one head; ``str()`` draws it.

    ``kinds[i, j]`` is EMPTY, PARTIAL or FULL (0, 1, 2) for tile i of queries and tile j of keys. Empty tiles are
    skipped; in full ones no pair is tested.
    """

    spec: AttentionSpec
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
    #: What the forward kernel runs by; empty where only a mask is explained, which has no kernel.
    algorithm: str
    #: Why that is not FlashAttention-3, in a clause; None where it is, or where the GPU is none that has it.
    why_not_fa3: str | None
    #: The same of the backward kernels; empty where there are none.
    backward_algorithm: str
    backward_why_not_fa3: str | None
    #: Those of them that multiply: how their work is cut, what that takes of a block, and why it is cut so.
    backward_kernels: tuple[KernelPlan, ...]
    width: int = field(default=80, repr=False)

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return int(self.kinds.size)

    @property
    def empty(self) -> int:
        """Tiles that hold no allowed pair as far as the rule knows: they are skipped."""
        return self._count(EMPTY)

    @property
    def partial(self) -> int:
        """Tiles in which every pair is tested."""
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
        return 2 * (self.spec.head_dim + self.spec.head_dim_v)

    def _count(self, kind: int) -> int:
        return int((self.kinds == kind).sum())

    def as_dict(self) -> dict[str, Any]:
        """The numbers and texts as plain values; the map is left out."""
        sizes = ("len_q", "len_kv", "tile_q", "tile_kv", "batch", "head")
        counts = ("tiles", "empty", "partial", "full", "flops", "dense_flops", "closed")
        texts = ("mask", "score", "key_begin", "key_end", "query_begin", "query_end")
        kernels = ("algorithm", "why_not_fa3", "backward_algorithm", "backward_why_not_fa3")
        from flashgen.plan.choices import choice_plain

        plain = {name: getattr(self, name) for name in (*sizes, *counts, *texts, *kernels)}
        return plain | {"backward_kernels": [choice_plain(kernel) for kernel in self.backward_kernels]}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        from flashgen.plan.choices import choice_lines

        yield _labelled("mask", self.mask)
        if self.score:
            yield _labelled("score", self.score)
        rows, columns = self.kinds.shape
        yield _labelled("tiles", f"{rows} x {columns} of {self.tile_q} queries by {self.tile_kv} keys")
        where = f"batch {self.batch}, head {self.head}"
        yield _labelled("", f"{where}, {self.len_q} queries, {self.len_kv} keys")
        kinds = ((self.empty, "skipped"), (self.partial, "partial"), (self.full, "full"))
        yield _labelled("", ", ".join(f"{n} {name} ({_percent(n, self.tiles)})" for n, name in kinds))
        share = _percent(self.flops, self.dense_flops)
        yield _labelled("work", f"{_flop(self.flops)} of {_flop(self.dense_flops)} dense ({share}), forward, one head")
        yield _labelled("keys", f"from {self.key_begin}")
        yield _labelled("", f"to before {self.key_end}")
        yield _labelled("queries", f"from {self.query_begin}")
        yield _labelled("", f"to before {self.query_end}")
        how = "by these bounds alone" if self.closed else "by these bounds, and a test of each tile between them"
        yield _labelled("found", how)
        if self.algorithm:
            yield _labelled("kernel", self.algorithm)
        if self.why_not_fa3 is not None:
            yield _labelled("", f"not FlashAttention-3: {self.why_not_fa3}")
        if self.backward_algorithm:
            yield _labelled("", f"backward: {self.backward_algorithm}")
        if self.backward_why_not_fa3 is not None:
            yield _labelled("", f"not FlashAttention-3: {self.backward_why_not_fa3}")
        for kernel in self.backward_kernels:
            yield from _wrapped(kernel.role, choice_lines(kernel), self.width)
        if self.tiles:
            yield ""
            yield from _map(self)


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
    arch: str | Arch = "sm_80",
    schedule: Schedule | None = None,
) -> Explanation:
    """Which tiles of one head's score matrix a spec's mask skips; nothing is evaluated pair by pair.

    ``spec`` may be a mask alone, or a function of b, h, q and k. Lengths that are left out are those of the
    captured tensors where they tell, else 1024. ``tile`` is (queries, keys) and by default the plan's for
    ``arch`` and ``schedule``. ``captured`` gives tensors by name in place of those that the mask was made with.
    """
    kernel = _forward(spec, schedule, arch) if isinstance(spec, AttentionSpec) else None
    backward = _backward(spec, schedule, arch) if isinstance(spec, AttentionSpec) else ()
    main = backward[0] if backward else None
    if not isinstance(spec, AttentionSpec):
        spec = AttentionSpec(64, mask=Mask.of(spec))
    tile_q, tile_kv = _tile(kernel or _forward(spec, schedule, arch)) if tile is None else tile
    values = _captured(spec, captured or {})
    sizes = _sizes(spec, values)
    len_q = sizes.get("q", len_kv or DEFAULT_LENGTH) if len_q is None else len_q
    len_kv = sizes.get("k", len_q) if len_kv is None else len_kv
    for name, number, least in (
        ("len_q", len_q, 0),
        ("len_kv", len_kv, 0),
        ("tile queries", tile_q, 1),
        ("tile keys", tile_kv, 1),
        ("batch", batch, 0),
        ("head", head, 0),
        ("width", width, 20),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= 2**30:
            raise ArgumentError(f"{name}={number!r} is out of range; use a whole number from {least} to 2**30")
    from flashgen.expr import text
    from flashgen.plan.algorithm import why_not_fa3

    rule = spec.mask.rule
    env = values | {"b": batch, "h": head, "q_len": len_q, "k_len": len_kv}
    return Explanation(
        spec=spec,
        len_q=len_q,
        len_kv=len_kv,
        tile_q=tile_q,
        tile_kv=tile_kv,
        batch=batch,
        head=head,
        kinds=_kinds(spec.mask, len_q, len_kv, tile_q, tile_kv, env),
        mask=spec.mask.describe(),
        score="" if spec.score is None else spec.score.describe(),
        key_begin=text(rule.key_begin),
        key_end=text(rule.key_end),
        query_begin=text(rule.query_begin),
        query_end=text(rule.query_end),
        closed=rule.hull_exact,
        algorithm=kernel.algorithm if kernel else "",
        why_not_fa3=why_not_fa3(kernel) if kernel else None,
        backward_algorithm=main.algorithm if main else "",
        backward_why_not_fa3=why_not_fa3(main) if main else None,
        backward_kernels=backward,
        width=width,
    )


def _kinds(mask: Mask, len_q: int, len_kv: int, tile_q: int, tile_kv: int, env: Mapping[str, Any]) -> NDArray[np.uint8]:
    """What becomes of each tile, worked out for many tiles at a time from their bounds."""
    import numpy as np

    rows, columns = -(-len_q // tile_q), -(-len_kv // tile_kv)
    if rows * columns > MOST_TILES:
        raise ArgumentError(
            f"{len_q} queries by {len_kv} keys are {rows} x {columns} tiles; "
            f"draw at most {MOST_TILES}: give a larger tile=({4 * tile_q}, {4 * tile_kv}), or shorter lengths"
        )
    kinds = np.zeros((rows, columns), np.uint8)
    if not kinds.size:
        return kinds
    k_lo = np.arange(columns)[None, :] * tile_kv
    bounds = dict(env) | {"k_lo": k_lo, "k_hi": np.minimum(k_lo + tile_kv, len_kv) - 1}
    step = max(1, _CHUNK // columns)
    for first in range(0, rows, step):
        q_lo = np.arange(first, min(first + step, rows))[:, None] * tile_q
        part = bounds | {"q_lo": q_lo, "q_hi": np.minimum(q_lo + tile_q, len_q) - 1}
        kinds[first : first + step] = _kinds_of(mask, part)
    return kinds


def _kinds_of(mask: Mask, env: Mapping[str, Any]) -> NDArray[np.uint8]:
    import numpy as np

    from flashgen.expr import evaluate_all

    rule = mask.rule
    begin, end, may, full = evaluate_all([rule.key_begin, rule.key_end, rule.may, rule.full], env)
    visited = (env["k_hi"] >= begin) & (env["k_lo"] < end)
    if not rule.keys_exact:
        visited = visited & may
    return np.where(visited, np.where(full, FULL, PARTIAL), EMPTY).astype(np.uint8)


def _forward(spec: AttentionSpec, schedule: Schedule | None, arch: str | Arch) -> KernelPlan:
    """The forward kernel that would be built."""
    from flashgen.plan import plan

    return plan(replace(spec, direction="forward"), schedule, arch).kernel("forward")


def _backward(spec: AttentionSpec, schedule: Schedule | None, arch: str | Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels with products that would be built, that of keys first; none where none can be planned."""
    from flashgen.errors import PlanError
    from flashgen.plan import plan

    if not spec.needs_backward:
        return ()
    try:
        kernels = plan(spec, schedule, arch).kernels
    except PlanError:
        return ()
    return tuple(kernel for kernel in kernels if kernel.pass_ == "backward" and kernel.role in ("main", "query"))


def _tile(kernel: KernelPlan) -> tuple[int, int]:
    return int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))


def _captured(spec: AttentionSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name for all that the mask captured."""
    from flashgen.spec.declared import Declared

    mask = spec.mask.traced
    unknown = sorted(set(given) - set(spec.tensors) - set(spec.scalars))
    if unknown:
        known = ", ".join([*spec.tensors, *spec.scalars]) or "nothing"
        raise ArgumentError(f"captured={{{unknown[0]!r}: ...}} is not captured; this spec captured {known}")
    values = {name: given.get(name, value) for name, value in {**mask.scalars, **mask.tensors}.items()}
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


def _map(explanation: Explanation) -> Iterator[str]:
    """The tile map, one character a tile, or for several tiles where there are too many."""
    rows, columns = explanation.kinds.shape
    down = -(-rows // _ROWS)
    across = -(-columns // max(1, explanation.width - _LABEL))
    scale = f"one character is {down} x {across} tiles, " if (down, across) != (1, 1) else ""
    legend = f"{SYMBOLS[EMPTY]} skipped  {SYMBOLS[PARTIAL]} partial  {SYMBOLS[FULL]} full"
    yield f"queries down, keys across; {scale}{legend}"
    yield " " * _LABEL + _ruler(-(-columns // across), across * explanation.tile_kv)
    for row in range(0, rows, down):
        cells = (explanation.kinds[row : row + down, column : column + across] for column in range(0, columns, across))
        symbols = "".join(SYMBOLS[_merged(cell)] for cell in cells)
        yield f"{row * explanation.tile_q:>{_LABEL - 1}} {symbols}"


def _merged(cell: NDArray[np.uint8]) -> int:
    """What several tiles are together: partial unless all are alike."""
    first = int(cell.flat[0])
    return first if (cell == first).all() else PARTIAL


def _ruler(characters: int, keys: int) -> str:
    """Key numbers above the columns where they fit."""
    line = "0"
    for column in range(16, characters, 16):
        number = str(column * keys)
        if len(line) < column and column + len(number) <= characters:
            line = line.ljust(column) + number
    return line


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _wrapped(label: str, texts: Iterable[str], width: int) -> Iterator[str]:
    for text in texts:
        for line in textwrap.wrap(text, width - _LABEL, subsequent_indent="  ") or [""]:
            yield _labelled(label, line)
            label = ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def _flop(count: int) -> str:
    for unit, name in ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} FLOP"
