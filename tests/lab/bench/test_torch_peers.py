"""torch's backends give what they are checked against, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.lab.bench.case import Case
from flashgen.lab.bench.peers import peers
from flashgen.lab.bench.run import Effort, time_attention
from flashgen.lab.timing.device import HostDevice

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_backends_are_right_and_those_that_fail_are_named(pass_: Any) -> None:
    import torch

    device = HostDevice()
    device.put = torch.from_numpy  # type: ignore[method-assign]
    device.get = lambda tensor: tensor.detach().numpy()  # type: ignore[method-assign]
    case = Case(pass_, "fp32", 16, True, 40, 2, 3)
    names = ("torch-math", "torch-flash", "torch-cudnn")
    timings = time_attention((case,), peers(names), device, effort=Effort(1, 1.0))
    assert {row.algorithm for row in timings.rows} >= {"torch-math"}
    # The CPU has no cuDNN.
    assert "torch-cudnn" in {skipped.algorithm for skipped in timings.skipped}
    assert not timings.wrong, str(timings)
