"""Kernels as machine code, for tests of what the assembler made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from flashgen.cache import default_cache
from flashgen.compile import Binary, compile_source, disassemble
from flashgen.plan.model import KernelPlan
from flashgen.render import render


def each_kernel(names: tuple[str, ...], builds: Iterable[tuple[str, tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """A test for each of these, an id and what makes the kernel.

    ``pytest --dist loadgroup`` lets one process do all that is asked of a kernel: it is disassembled once.
    """
    return pytest.mark.parametrize(
        names, [pytest.param(*values, id=id_, marks=pytest.mark.xdist_group(id_)) for id_, values in builds]
    )


@cache
def compiled(kernel: KernelPlan) -> Binary:
    return default_cache().get_or_compile(render(kernel), compile_source)[0]


def disassembled(image: bytes) -> str:
    """A cubin's text; where nothing can read it, the test is skipped."""
    text = disassemble(image)
    if text is None:
        pytest.skip("no disassembler is installed that reads this cubin: pip install nvidia-cuda-nvdisasm")
    return text


@cache
def machine_code(kernel: KernelPlan) -> list[str]:
    """One instruction a line, without predicates."""
    text = disassembled(compiled(kernel).image)
    found: list[str] = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text, re.M)
    assert len(found) > 500
    return found


def has_own_memory(lines: list[str]) -> list[str]:
    """Those that read or write what threads have for registers that they lack."""
    return [line for line in lines if re.match(r"(LDL|STL)\b", line)]


def is_product(line: str, operand: str = "") -> bool:
    """Whether it is one whose left operand is of that kind: ``gdesc``, in shared memory, or ``R``, in registers."""
    return re.search(rf"HGMMA\S* R\d+, {operand}", line) is not None


def products(lines: list[str]) -> tuple[int, int]:
    """Where the first and the last one stand: a kernel's loop lies between them."""
    found = [i for i, line in enumerate(lines) if is_product(line)]
    return found[0], found[-1]
