"""Which pairs a call drops: drawn from torch's generator, and kept with what the backward pass needs.

The state is a tensor of two 64-bit integers that the kernels read, so that a captured CUDA graph drops other pairs
at each replay, and recomputing a call with torch's generator put back drops the same.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.spec import Dropout


def drawn_state(dropout_p: float, q: Any, given: Any = None) -> Any:
    """A state from the default generator of q's device, unless one is given; None where nothing is dropped."""
    if dropout_p == 0.0:
        return None
    if not 0.0 < dropout_p < 1.0:
        raise ArgumentError(f"dropout_p={show(dropout_p)} is no probability to drop a pair with; use 0.0 to below 1.0")
    if given is not None:
        return given
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)


def dropout_of(dropout_p: float, state: Any) -> Dropout | None:
    """A kernel's dropout arguments; None where nothing is dropped."""
    if state is None:
        if dropout_p != 0.0:
            raise ArgumentError(f"dropout_p={show(dropout_p)} without rng_state; pass two 64-bit integers as a tensor")
        return None
    return Dropout(dropout_p, state=state)
