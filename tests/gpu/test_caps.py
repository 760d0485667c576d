"""Softcaps on a GPU, whose exponentials and reciprocals are rounded otherwise than the emulator's: what the header is
held to on the CPU holds there."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import numpy as np
import pytest

from flashgen.arch import arch_for_capability
from flashgen.compile import nvrtc
from flashgen.compile.options import options_for
from flashgen.launch.driver.cuda import get_driver
from flashgen.render.amalgamation.amalgamate import amalgamate
from flashgen.render.source import Origin
from tests.expr import test_cap_header as header

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
THREADS = 32


@cache
def caps_kernel() -> Any:
    """The header's kernel, loaded."""
    driver = get_driver()
    lines = [(line, Origin("caps.cu", n)) for n, line in enumerate(header.SOURCE.splitlines(), start=1)]
    text = "\n".join(line for line, _ in amalgamate(lines)) + "\n"
    compiled = nvrtc.run(text, "caps.cu", options_for(arch_for_capability(driver.capability(0))))
    assert compiled.succeeded, compiled.log
    return driver.function(driver.load(compiled.cubin), "caps", 0)


def computed(name: str, x: header.Array) -> header.Computed:
    """As the header's test has it of the emulator."""
    import torch

    given = torch.from_numpy(x).cuda()
    out = torch.zeros(x.size, header.RESULTS, device="cuda")
    struct_bytes = struct.pack("QQffi4x", given.data_ptr(), out.data_ptr(), *header.CAPS[name], x.size)
    params = ctypes.create_string_buffer(struct_bytes, len(struct_bytes))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    driver = get_driver()
    torch.cuda.synchronize()
    driver.call("cuLaunchKernel", caps_kernel(), 1, 1, 1, THREADS, 1, 1, 0, 0, ctypes.addressof(pointers), 0)
    torch.cuda.synchronize()
    return header.Computed(x, *np.ascontiguousarray(out.cpu().numpy().T))


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    monkeypatch.setattr(
        header, "computed", lambda name, x=None: computed(name, header.products(name) if x is None else x)
    )


# All of them, so that none is left behind when the header changes.
globals().update({name: test for name, test in vars(header).items() if name.startswith("test_")})
