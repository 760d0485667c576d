"""Masks given as arrays of bools: an element for each pair, true where the query may attend to the key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_AXES = "bhqk"
#: What to write where an array is no mask by itself.
REMEDY = "write lambda b, h, q, k: m[b, h, q, k] for other layouts, and score=flashgen.bias(m) for numbers to add"


def problem_with(element: str, shape: Sequence[int]) -> str | None:
    """Why an array is no mask; None if it is one."""
    if element == "bool" and 1 <= len(shape) <= len(_AXES):
        return None
    return (
        f"mask is a tensor of {element} and shape {tuple(shape)}; pass bools of shape (batch, heads, len_q, len_kv), "
        f"where leading dimensions may be missing and any may be 1, or {REMEDY}"
    )


def mask_function(mask: Any) -> Callable[..., Any]:
    """``mask[b, h, q, k]`` as a function; leading dimensions may be missing, and dimensions of 1 are broadcast."""
    axes = ["0" if size == 1 else axis for size, axis in zip(mask.shape, _AXES[-len(mask.shape) :], strict=True)]
    # A text, which is a constant to all who trace the function.
    order = "".join(axes)

    def allowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        places = {"b": b, "h": h, "q": q, "k": k, "0": 0}
        return mask[tuple([places[axis] for axis in order])]

    return allowed
