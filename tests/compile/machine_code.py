"""Kernels as machine code, for tests of what the assembler made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from flashgen.cache import default_cache
from flashgen.compile import Binary, compile_source, disassemble
from flashgen.plan.model import KernelPlan
from flashgen.render import render


def each_kernel(names: tuple[str, ...], builds: Iterable[tuple[str, tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """A test for each of these, an id and what makes the kernel.

    ``pytest --dist loadgroup`` lets one process do all that is asked of an id: the kernel is disassembled once.
    """
    return pytest.mark.parametrize(names, [pytest.param(*values, id=id_) for id_, values in builds])


@cache
def compiled(kernel: KernelPlan) -> Binary:
    return default_cache().get_or_compile(render(kernel), compile_source)[0]


def nameless(kernel: KernelPlan) -> str:
    """The text that is compiled, without the kernel's name."""
    return re.sub(rf"\b{kernel.name}\b", "", render(kernel).code)


def disassembled(image: bytes) -> str:
    """A cubin's text; where nothing can read it, the test is skipped."""
    text = disassemble(image)
    if text is None:
        pytest.skip("no disassembler is installed that reads this cubin: pip install nvidia-cuda-nvdisasm")
    return text


@dataclass(frozen=True)
class Code:
    """Instructions without predicates, and of each those that may come next."""

    lines: list[str]
    next: list[tuple[int, ...]]

    def may_follow(self, start: int, ends: Callable[[str], bool]) -> tuple[set[int], set[int]]:
        """Those on any way from an instruction to the first that ends it, and those that do."""
        passed: set[int] = set()
        ended: set[int] = set()
        left = list(self.next[start])
        while left:
            at = left.pop()
            if ends(self.lines[at]):
                ended.add(at)
            elif at not in passed:
                passed.add(at)
                left += self.next[at]
        return passed, ended

    def straight(self) -> list[list[str]]:
        """Runs of instructions that are only carried out together: no branch leads out of one's midst, or into it."""
        leaves = [line.startswith("BRA ") for line in self.lines]
        entered = {to for i, leave in enumerate(leaves) if leave for to in self.next[i]}
        begins = [i for i in range(len(self.lines)) if i == 0 or leaves[i - 1] or i in entered]
        return [self.lines[a:b] for a, b in zip(begins, [*begins[1:], len(self.lines)], strict=True)]


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;|^(\.L\w+):", re.M)


@cache
def code(kernel: KernelPlan) -> Code:
    """A kernel's instructions, and the ways through them."""
    lines: list[str] = []
    always: list[bool] = []
    labels: dict[str, int] = {}
    for predicate, line, label in _INSTRUCTION.findall(disassembled(compiled(kernel).image)):
        if label:
            labels[label] = len(lines)
            continue
        lines.append(line)
        always.append(not predicate)
    assert len(lines) > 500
    return Code(lines, [_next_of(i, line, always[i], labels) for i, line in enumerate(lines)])


def _next_of(at: int, line: str, always: bool, labels: dict[str, int]) -> tuple[int, ...]:
    """Where an instruction leads: on, but for one that always leaves, and to what a branch names."""
    name, _, operands = line.partition(" ")
    goes_on = not (always and (name in ("EXIT", "RET") or (name == "BRA" and operands.startswith("`"))))
    target = re.search(r"`\((\.L\w+)\)", operands) if name.split(".")[0] in ("BRA", "WARPSYNC") else None
    return (*((at + 1,) if goes_on else ()), *((labels[target[1]],) if target else ()))


def machine_code(kernel: KernelPlan) -> list[str]:
    """One instruction a line, without predicates, in the order in which they stand."""
    return code(kernel).lines


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
