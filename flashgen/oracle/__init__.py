"""The definition of attention: NumPy float64 formulas, and how far from them a kernel may be."""

from flashgen.oracle.attention import allowed_pairs, backward, forward
from flashgen.oracle.bounds import Bounds, Check, bounds, check
from flashgen.oracle.rounded import rounded_backward, rounded_forward

__all__ = [
    "Bounds",
    "Check",
    "allowed_pairs",
    "backward",
    "bounds",
    "check",
    "forward",
    "rounded_backward",
    "rounded_forward",
]
