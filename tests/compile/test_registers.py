"""What is refused for want of registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.compile import Binary, Resources, require_registers
from flashgen.errors import SerialisedError, SpillError

HOPPER, OTHERS = (SimpleNamespace(algorithm=f"FlashAttention-{n}", role="forward") for n in (3, 2))
BACKWARD = SimpleNamespace(algorithm="FlashAttention-3", role="main")


def binary(*, spill_bytes: int = 0, log: str = "ptxas info : Used 168 registers") -> Binary:
    return Binary("forward_d64", "sm_90a", b"", Resources(168, spill_bytes, 0, 0), 1.0, log)


@pytest.mark.parametrize("plan", [HOPPER, OTHERS])
def test_products_that_wait_for_each_other_are_refused(plan: Any) -> None:
    said = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    with pytest.raises(SerialisedError, match="forward_d64: the assembler makes") as caught:
        require_registers(plan, binary(log=f"ptxas info : Used 168 registers\n{said}"))
    assert caught.value.log == said
    require_registers(plan, binary(log="ptxas info : (C7517) one harmless wait"))


def test_hoppers_forward_kernel_must_not_spill_and_others_may() -> None:
    with pytest.raises(SpillError, match=r"forward_d64: 16 bytes per thread .* use a smaller tile_kv"):
        require_registers(HOPPER, binary(spill_bytes=16))
    require_registers(OTHERS, binary(spill_bytes=16))
    require_registers(BACKWARD, binary(spill_bytes=16))
    require_registers(HOPPER, binary())
