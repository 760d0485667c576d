"""Arrays with an element for each pair, and masks given as arrays of bools, true where the query may attend."""

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
        return element_at(mask, order, b, h, q, k)

    return allowed


def element_at(tensor: Any, axes: str, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The tensor's element for a pair; ``axes`` has an index out of ``bhqk``, or ``0``, for each dimension."""
    places = {"b": b, "h": h, "q": q, "k": k, "0": 0}
    # A list, which torch.compile can follow.
    return tensor[tuple([places[axis] for axis in axes])]
