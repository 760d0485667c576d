"""The options of a call, and the checks of their types."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np
import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.spec import Sequences


class Options(NamedTuple):
    """All that decides the result of a call besides its tensors and its program."""

    scale: float | None = None
    #: None follows torch.use_deterministic_algorithms.
    deterministic: bool | None = None
    dropout_p: float = 0.0
    sequences: Sequences | None = None
    #: Decides which pairs are dropped; drawn from torch's generator where it is None.
    rng_state: Any = None


# Callers compare types first, which is quicker than these functions, and call them for what is left.


def check_flags(**flags: Any) -> None:
    """ArgumentError for what is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ArgumentError(f"{name}={show(value)} is not a bool; pass True or False")


def check_dense(**tensors: Any) -> None:
    """ArgumentError for a tensor that is nested or sparse, and so has no strides."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and (x.is_nested or x.layout is not torch.strided):
            kind = "nested tensor" if x.is_nested else f"tensor of layout {x.layout}"
            remedy = ", and sequences= for sequences of different lengths" if x.is_nested else ""
            raise ArgumentError(f"{name} is a {kind}; pass a dense one{remedy}")


def number_of(name: str, value: Any) -> float:
    """A number of any library as Python's; one in a tensor without dimensions is read now."""
    if isinstance(value, torch.Tensor):
        is_number = value.dim() == 0 and value.dtype != torch.bool and not value.is_complex()
    else:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise ArgumentError(f"{name}={show(value)} is not a number; pass a Python float")
    try:
        number = float(value)
    except OverflowError:
        raise ArgumentError(f"{name}={show(value)} is larger than any float; pass a smaller number") from None
    return value if isinstance(value, int) else number
