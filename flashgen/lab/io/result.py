"""The result of ``io_model``: a table by algorithm, and the paper's lower bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from flashgen.lab.io.paper import Formula, formulas
from flashgen.lab.io.sizes import Sizes
from flashgen.lab.io.traffic import AlgorithmIO
from flashgen.lab.text import bytes_text, html_table, table

_WIDTH = 100
#: What savings are relative to.
BASELINE = "paper_standard"
_COLUMNS = ("algorithm", "basis", "tile", "read", "written", "total", "IO savings", "memory", "memory savings")


@dataclass(frozen=True, slots=True)
class IOModel:
    """Bytes to and from device memory, by algorithm; ``str()`` draws the table."""

    sizes: Sizes
    rows: tuple[AlgorithmIO, ...]

    def __getitem__(self, algorithm: str) -> AlgorithmIO:
        for row in self.rows:
            if row.algorithm == algorithm:
                return row
        raise KeyError(algorithm)

    def __contains__(self, algorithm: object) -> bool:
        return any(row.algorithm == algorithm for row in self.rows)

    @property
    def inputs(self) -> int:
        """Bytes of Q, K and V."""
        return self.sizes.q + self.sizes.k + self.sizes.v

    @property
    def output(self) -> int:
        """Bytes of O."""
        return self.sizes.o

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """The orders of growth that the papers state, with the constant 1."""
        return formulas(self.sizes)

    @property
    def lower_bound(self) -> float:
        """``N^2 d^2 / M`` elements for all heads, with the constant 1: the order that no exact algorithm can beat."""
        return self.formulas[-1].elements

    def traffic_savings(self, algorithm: str) -> float:
        """How many times the bytes of ``paper_standard`` are those of an algorithm."""
        return _ratio(self[BASELINE].total, self[algorithm].total)

    def memory_savings(self, algorithm: str) -> float:
        """How many times the memory that ``paper_standard`` stores is that of an algorithm, O counted with both."""
        return _ratio(self[BASELINE].memory + self.output, self[algorithm].memory + self.output)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        sizes = self.sizes
        return {
            "spec": sizes.spec.describe(),
            "arch": sizes.arch.name,
            "pass": sizes.pass_,
            "batch": sizes.batch,
            "heads": sizes.heads,
            "heads_kv": sizes.heads_kv,
            "len_q": sizes.len_q,
            "len_kv": sizes.len_kv,
            "sram_bytes": sizes.sram,
            "lower_bound_elements": self.lower_bound,
            "input_bytes": self.inputs,
            "output_bytes": self.output,
            "formulas": [formula.as_dict() for formula in self.formulas],
            "algorithms": [
                row.as_dict()
                | {
                    "traffic_savings": self.traffic_savings(row.algorithm),
                    "memory_savings": self.memory_savings(row.algorithm),
                }
                for row in self.rows
            ],
        }

    @property
    def title(self) -> str:
        """One line about the spec and the sizes."""
        s = self.sizes
        heads = f"{s.heads} heads" if s.heads == s.heads_kv else f"{s.heads} heads, {s.heads_kv} of keys"
        lengths = f"{s.len_q} queries" + ("" if s.len_q == s.len_kv else f", {s.len_kv} keys")
        return f"{s.pass_} of {s.spec.describe()}, {s.arch.name}: batch {s.batch}, {heads}, {lengths}"

    @property
    def bound_line(self) -> str:
        """The lower bound, in a sentence."""
        s = self.sizes
        elements = self.lower_bound
        return (
            f"lower bound N^2 d^2 / M = {elements:.4g} elements ({bytes_text(round(elements * s.item))}), constant 1,"
            f" M = {s.sram} bytes = {s.sram_elements} elements"
        )

    def __str__(self) -> str:
        notes = (fill(f"{row.algorithm}: {row.assumptions}.", _WIDTH, subsequent_indent="  ") for row in self.rows)
        return "\n".join([self.title, self.bound_line, "", table(self._cells()), "", *notes])

    def _repr_html_(self) -> str:
        return html_table(self._cells(), f"{self.title}; {self.bound_line}")

    def _cells(self) -> Iterator[tuple[str, ...]]:
        yield _COLUMNS
        for formula in self.formulas:
            total = bytes_text(round(formula.elements * self.sizes.item))
            yield formula.text, "formula", "-", "-", "-", total, "-", "-", "-"
        for row in self.rows:
            yield (
                row.algorithm,
                row.basis,
                "-" if row.tile is None else f"{row.tile[0]} x {row.tile[1]}",
                bytes_text(row.read),
                bytes_text(row.written),
                bytes_text(row.total),
                f"{self.traffic_savings(row.algorithm):.3g}x",
                bytes_text(row.memory),
                f"{self.memory_savings(row.algorithm):.3g}x",
            )


def _ratio(a: int, b: int) -> float:
    return a / b if b else 1.0
