"""What is refused for want of registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.compile import Binary, Resources, require_registers
from flashgen.errors import SerialisedError, SpillError
from flashgen.plan import plan

HOPPER, OTHERS = (SimpleNamespace(refuses_spills=refuses) for refuses in (True, False))


def binary(*, spill_bytes: int = 0, log: str = "ptxas info : Used 168 registers") -> Binary:
    return Binary("forward_d64", "sm_90a", b"", Resources(168, spill_bytes, 0, 0), 1.0, log)


@pytest.mark.parametrize("planned", [HOPPER, OTHERS])
def test_products_that_wait_for_each_other_are_refused(planned: Any) -> None:
    said = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    with pytest.raises(SerialisedError, match="forward_d64: the assembler makes") as caught:
        require_registers(planned, binary(log=f"ptxas info : Used 168 registers\n{said}"))
    assert caught.value.log == said
    require_registers(planned, binary(log="ptxas info : (C7517) one harmless wait"))


def test_hoppers_forward_kernel_alone_refuses_to_spill() -> None:
    spec = fg.AttentionSpec(64, mask=fg.document(np.zeros((1, 9), np.int32)))
    for arch, roles in (("sm_90a", ["forward"]), ("sm_80", [])):
        assert [k.role for k in plan(spec, None, arch).kernels if k.refuses_spills] == roles


def test_a_spill_is_refused_where_the_plan_says_so() -> None:
    with pytest.raises(SpillError, match=r"forward_d64: 16 bytes per thread .* use a smaller tile_kv"):
        require_registers(HOPPER, binary(spill_bytes=16))
    require_registers(OTHERS, binary(spill_bytes=16))
    require_registers(HOPPER, binary())
