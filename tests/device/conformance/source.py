"""From a kernel's file to the text that both compilers get."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flashgen.render.amalgamation.amalgamate import amalgamate
from flashgen.render.source import Origin

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

#: Below each kernel's own text, which defines Params, Variant, kThreads and run: the variants in use, and the
#: kernel that runs the one the launch names.
_ENTRY = """
constexpr Variant kVariants[] = {{{variants}}};

template <i32 index>
FLASHGEN_DEVICE void dispatch(const Params& params) {{
  if (params.variant == index) return run<kVariants[index]>(params);
  if constexpr (index + 1 < {count}) dispatch<index + 1>(params);
}}

FLASHGEN_KERNEL(kThreads, 1) {symbol}(FLASHGEN_GRID_CONSTANT Params params) {{ dispatch<0>(params); }}
"""

_PARAMS = re.compile(r"^struct Params \{\n(.*?)^\};", re.S | re.M)
_FIELD = re.compile(r"^\s*(.+?)\s*\b(\w+)(?:\s*=[^;]*)?;")


class Field(NamedTuple):
    """A field of a kernel's parameter struct."""

    type: str
    name: str


def symbol(kernel: str) -> str:
    """The name of the ``__global__`` function."""
    return f"test_{kernel}"


@functools.cache
def kernel_text(kernel: str) -> str:
    """The file as it was written."""
    return (KERNELS / f"{kernel}.cu").read_text(encoding="utf-8")


@functools.cache
def fields(kernel: str) -> tuple[Field, ...]:
    """The parameter struct, read from the file: the kernel's text is the table for packing, too."""
    struct = _PARAMS.search(kernel_text(kernel))
    if struct is None:
        raise ValueError(f"kernels/{kernel}.cu has no struct Params with one field per line")
    lines = [line.split("//")[0] for line in struct[1].splitlines()]
    found = [_FIELD.match(line) for line in lines if line.strip()]
    if not all(found):
        raise ValueError(f"kernels/{kernel}.cu: a line of struct Params is not one field")
    return tuple(Field(match[1], match[2]) for match in found if match)


def unit(kernel: str, variants: Sequence[str]) -> str:
    """One self-contained text: the kernel with these variants."""
    return "".join(f"{line}\n" for line in _amalgamated(kernel)) + entry(kernel, variants)


def entry(kernel: str, variants: Sequence[str]) -> str:
    """What follows a kernel's own text."""
    return _ENTRY.format(variants=", ".join(variants), count=len(variants), symbol=symbol(kernel))


@functools.cache
def _amalgamated(kernel: str) -> tuple[str, ...]:
    name = f"tests/device/kernels/{kernel}.cu"
    lines = [(line, Origin(name, n)) for n, line in enumerate(kernel_text(kernel).splitlines(), start=1)]
    return tuple(text for text, _ in amalgamate(lines))
