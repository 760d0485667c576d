"""Options that are True or False, or numbers: what else somebody passes is refused before anything depends on it."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError

# Callers compare types first, which is quicker than these functions, and call them for what is left.


def check_flags(**flags: Any) -> None:
    """ArgumentError for what is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ArgumentError(f"{name}={show(value)} is not a bool; pass True or False")


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
