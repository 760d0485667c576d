"""Every primitive has a case."""

from __future__ import annotations

import re

from conformance.cases import CASES
from conformance.digest import reached
from conformance.source import kernel_text

from flashgen.render.paths import include_dir

#: What it does is an order of instructions, which tests/compile reads from machine code; it leaves no value.
WITHOUT_RESULT = {"wgmma_compute_before_wait", "fence_proxy_async_global"}
FUNCTION = re.compile(r"^FLASHGEN_DEVICE\s+[\w:]+\s+(\w+)\(", re.M)


def test_every_device_function_is_called_by_a_kernel_that_runs() -> None:
    headers = sorted((include_dir() / "flashgen" / "ptx").glob("*.cuh"))
    functions = set().union(*(FUNCTION.findall(header.read_text()) for header in headers))
    kernels = {case.kernel for case in CASES.values()}
    named = {word for kernel in kernels for word in re.findall(r"\w+", kernel_text(kernel))}
    assert len(functions) > 40
    assert functions - named == WITHOUT_RESULT


def test_a_digest_covers_the_functions_that_a_kernel_reaches_and_no_others() -> None:
    found = " ".join(reached(kernel_text("mma")))
    assert "mma.sync.aligned.m16n8k8" in found
    assert "ldmatrix.sync" not in found
