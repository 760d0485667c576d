"""The definition of attention: NumPy float64 formulas, and how far from them a kernel may be."""

from flashgen.oracle.attention import allowed_pairs, backward, forward
from flashgen.oracle.bounds import Bounds, Check, bounds, check
from flashgen.oracle.cache import appended, forward_cached, turned
from flashgen.oracle.captured import captured_gradients
from flashgen.oracle.captured_bounds import captured_bounds
from flashgen.oracle.dropout import dropout_mask
from flashgen.oracle.rounded import rounded_backward, rounded_forward
from flashgen.oracle.rules import Rules

__all__ = [
    "Bounds",
    "Check",
    "Rules",
    "allowed_pairs",
    "appended",
    "backward",
    "bounds",
    "captured_bounds",
    "captured_gradients",
    "check",
    "dropout_mask",
    "forward",
    "forward_cached",
    "rounded_backward",
    "rounded_forward",
    "turned",
]
