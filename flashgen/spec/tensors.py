"""Tensors among the arguments of named masks and scores."""

from __future__ import annotations

from typing import Any

from flashgen.common.show import show
from flashgen.errors import SpecError
from flashgen.expr import is_masked, is_tensor


def check_tensor(name: str, value: Any, *ranks: int) -> int:
    """The rank of a tensor argument, which must be one of ``ranks``."""
    if is_masked(value):
        raise SpecError(f"{name} is a masked array, whose mask kernels do not see; pass {name}.filled(0)")
    if not is_tensor(value) or len(value.shape) not in ranks:
        shape = f" of shape {tuple(value.shape)}" if is_tensor(value) else ""
        wanted = " or ".join(map(str, ranks))
        raise SpecError(f"{name}={show(value)}{shape} is not a tensor of {wanted} dimensions; pass one")
    return len(value.shape)
