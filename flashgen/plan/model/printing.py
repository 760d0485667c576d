"""A plan for people: one line for each kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.plan.model.plans import AttentionPlan, KernelPlan

COLUMNS = ("kernel", "tile", "stages", "warps", "shared memory", "grid (x, y, z)")


def printed(plan: AttentionPlan) -> str:
    """What is planned for which GPU, and a table of the kernels."""
    title = f"{plan.spec.describe()}, for {plan.arch.name} ({plan.arch.example})"
    return "\n".join([title, *_table([COLUMNS, *map(_cells, plan.kernels)])])


def printed_kernel(kernel: KernelPlan) -> str:
    """The line of one kernel, with words in place of a table's head."""
    name, *cells = _cells(kernel)
    labels = ("tile", "stages", "warps", "shared memory", "grid")
    return f"{name}: " + ", ".join(f"{label} {cell}" for label, cell in zip(labels, cells, strict=True) if cell != "-")


def _cells(kernel: KernelPlan) -> tuple[str, ...]:
    values = {member.name: str(member.value) for member in kernel.config}
    tile = f"{values['tile_q']} x {values['tile_kv']}" if {"tile_q", "tile_kv"} <= values.keys() else "-"
    smem = f"{kernel.smem.bytes} bytes" if kernel.smem.bytes else "-"
    return kernel.name, tile, values.get("stages", "-"), str(kernel.threads // 32), smem, _grid(kernel)


def _grid(kernel: KernelPlan) -> str:
    if kernel.fixed_blocks is not None:
        return f"({kernel.fixed_blocks}, 1, 1)"
    if kernel.grid_over == "pairs":
        tiles = f"ceil(Sq / {kernel.grid_tile}) * ceil(Sk / {kernel.constant('tile_kv')})"
    else:
        length = {"q": "Sq", "kv": "Sk", "rows": "max(total_q, total_kv)"}[kernel.grid_over]
        tiles = f"ceil({length} / {kernel.grid_tile})"
    tiles += " * splits" if kernel.grid_splits else ""
    heads = {"q": "H", "kv": "Hk", "one": "1"}[kernel.grid_heads]
    batch = "B" if kernel.grid_batch == "each" else "1"
    if kernel.is_persistent:
        return f"as many blocks as run at once, for {tiles} * {heads} * {batch} tiles"
    return f"({tiles}, {heads}, {batch})"


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
