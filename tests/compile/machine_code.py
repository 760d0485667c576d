"""Kernels as machine code, for tests of what the assembler made of them."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import pytest

from flashgen.cache import default_cache
from flashgen.compile import Binary, compile_source, disassemble
from flashgen.compile.disassembler import disassemblers
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import render


def each_kernel(names: tuple[str, ...], builds: Iterable[tuple[str, tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """A test for each of these, an id and what makes the kernel.

    ``pytest --dist loadgroup`` lets one process do all that is asked of an id, and several ids one after another.
    """
    return pytest.mark.parametrize(names, [pytest.param(*values, id=id_) for id_, values in builds])


#: What was compiled by this process; what is in here and not in ``_codes`` is disassembled next.
_compiled: dict[KernelPlan, Binary] = {}
_codes: dict[KernelPlan, Code] = {}


def compiled(kernel: KernelPlan) -> Binary:
    if kernel not in _compiled:
        _compiled[kernel] = default_cache().get_or_compile(render(kernel), compile_source)[0]
    return _compiled[kernel]


def nameless(kernel: KernelPlan) -> str:
    """The text that is compiled, without the kernel's name."""
    return re.sub(rf"\b{kernel.name}\b", "", render(kernel).code)


def disassembled(image: bytes) -> str:
    """A cubin's text; where nothing can read it, the test is skipped."""
    text = disassemble(image)
    if text is None:
        skip()
    return text


def skip() -> NoReturn:
    pytest.skip("no disassembler is installed that reads this cubin: pip install nvidia-cuda-nvdisasm")


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


_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;", re.M)


def code(kernel: KernelPlan) -> Code:
    """A kernel's instructions, and the ways through them."""
    compiled(kernel)
    if kernel not in _codes:
        new = [other for other in _compiled if other not in _codes]
        _codes.update(zip(new, codes([instructions_of(_compiled[other]) for other in new]), strict=True))
    return _codes[kernel]


def codes(kernels: list[bytes]) -> list[Code]:
    """Of several kernels' bytes; the disassembler takes four times as long to start as to read one of them."""
    found: list[list[tuple[int, str, str]]] = [[] for _ in kernels]
    begins = list(accumulate(map(len, kernels), initial=0))
    for address, predicate, line in _INSTRUCTION.findall(_disassembled_raw(b"".join(kernels))):
        number = bisect_right(begins, int(address, 16)) - 1
        found[number].append((int(address, 16), predicate, line))
    return [_code(instructions) for instructions in found]


def _code(instructions: list[tuple[int, str, str]]) -> Code:
    lines = [line for _, _, line in instructions]
    assert len(lines) > 500
    places = {address: i for i, (address, _, _) in enumerate(instructions)}
    return Code(
        lines, [_next_of(i, line, not predicate, places) for i, (_, predicate, line) in enumerate(instructions)]
    )


def _disassembled_raw(instructions: bytes) -> str:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "instructions"
        file.write_bytes(instructions)
        for program in disassemblers():
            command = [program, "--binary", "SM90a", "--no-dataflow", file]
            if program.stem == "nvdisasm":
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    return done.stdout
    skip()


def instructions_of(binary: Binary) -> bytes:
    """The section of an ELF file that holds them."""
    image = binary.image
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    begin_of_names = sections[names][4]
    wanted = f".text.{binary.name}\0".encode()
    (found,) = (s for s in sections if image.startswith(wanted, begin_of_names + s[0]))
    return image[found[4] : found[4] + found[5]]


def _next_of(at: int, line: str, always: bool, places: dict[int, int]) -> tuple[int, ...]:
    """Where an instruction leads: on, but for one that always leaves, and to what a branch names."""
    name, _, operands = line.partition(" ")
    goes_on = not (always and (name in ("EXIT", "RET") or (name == "BRA" and operands.startswith("0x"))))
    target = re.search(r"\b0x([0-9a-f]+)$", operands) if name.split(".")[0] in ("BRA", "WARPSYNC") else None
    to = None if target is None else places.get(int(target[1], 16))
    return (*((at + 1,) if goes_on else ()), *(() if to is None else (to,)))


def machine_code(kernel: KernelPlan) -> list[str]:
    """One instruction a line, without predicates, in the order in which they stand."""
    return code(kernel).lines


def has_own_memory(lines: list[str]) -> list[str]:
    """Those that read or write what threads have for registers that they lack."""
    return [line for line in lines if re.match(r"(LDL|STL)\b", line)]


def is_product(line: str, operand: str = "") -> bool:
    """Whether it is one whose left operand is of that kind: ``gdesc``, in shared memory, or ``R``, in registers."""
    return re.search(rf"[HQ]GMMA\S* R\d+, {operand}", line) is not None


def products(lines: list[str]) -> tuple[int, int]:
    """Where the first and the last one stand: a kernel's loop lies between them."""
    found = [i for i, line in enumerate(lines) if is_product(line)]
    return found[0], found[-1]
