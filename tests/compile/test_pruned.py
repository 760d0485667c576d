"""Leaving out what a kernel does not reach changes no instruction."""

from __future__ import annotations

import os
import struct

import pytest

from flashgen.cache import default_cache
from flashgen.compile import compile_source
from flashgen.plan import plan
from flashgen.render import KernelSource, render
from flashgen.render.engine import rendered_lines
from flashgen.render.golden import GOLDEN, Golden
from flashgen.spec import AttentionSpec, Schedule, causal

pytestmark = pytest.mark.in_turns(12)

#: Rows in global memory that are aligned to fewer bytes than those of the goldens: 2, 4, 8, and 4 of float.
ALIGNED = tuple(
    Golden(AttentionSpec(head_dim, dtype=dtype, mask=causal()), "sm_80", ("forward", "prepare", "main", "finish"))
    for head_dim, dtype in ((5, "bf16"), (6, "fp16"), (20, "bf16"), (5, "fp32"))
)
#: Kernels that also read rows of other alignments, their own workspaces.
WORKSPACES = (
    Golden(AttentionSpec(5, mask=causal()), "sm_80", ("scores", "forward", "dq", "dk"), Schedule(algorithm="standard")),
)
#: A developer's run compiles a few of them.
ROWS = (*GOLDEN, *ALIGNED, *WORKSPACES)[:: 12 if os.environ.get("DRAWN_CASES", "sample") == "sample" else 1]


def instructions(cubin: bytes) -> dict[str, bytes]:
    """The sections of machine code, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    first_name = sections[names][4]
    found = {}
    for name_at, _, _, _, offset, length in sections:
        name = cubin[first_name + name_at : cubin.index(b"\0", first_name + name_at)].decode()
        if name.startswith(".text"):
            found[name] = cubin[offset : offset + length]
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.spec.describe()} {row.arch}")
def test_a_kernel_has_the_same_instructions_with_and_without_what_it_does_not_reach(row: Golden) -> None:
    attention = plan(row.spec, row.schedule, row.arch)
    for role in row.roles:
        kernel = attention.kernel(role)
        everything = "".join(f"{line}\n" for line, _ in rendered_lines(kernel, everything=True))
        short = render(kernel)
        assert len(short.text) < 0.8 * len(everything)
        before = compile_source(KernelSource(kernel, everything))
        # Other tests compile the same text, so the cache may have it.
        after, _ = default_cache().get_or_compile(short, compile_source)
        assert before.resources == after.resources, kernel.name
        assert instructions(before.image) == instructions(after.image), kernel.name
