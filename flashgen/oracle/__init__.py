"""The definition of attention: NumPy float64 formulas, and the error that a kernel may have."""

from flashgen.oracle.attention import allowed_pairs, backward, forward
from flashgen.oracle.bounds import Bounds, Check, bounds, check
from flashgen.oracle.cache import appended, forward_cached, turned
from flashgen.oracle.captured import captured_gradients
from flashgen.oracle.captured_bounds import captured_bounds
from flashgen.oracle.dropout import dropout_mask
from flashgen.oracle.eight_bits import quantized, rounding_error, values_of
from flashgen.oracle.quantization import (
    dequantized_rows,
    quantization_error,
    quantized_packed_rows,
    quantized_rows,
    rotation,
)
from flashgen.oracle.rounded import rounded_backward, rounded_captured_gradients, rounded_forward
from flashgen.oracle.rules import Rules
from flashgen.oracle.slope import (
    LSE_SLOPE_TOLERANCE,
    SLOPE_TOLERANCE,
    CaseSlope,
    Slope,
    case_slope,
    pooled_slope,
)

__all__ = [
    "LSE_SLOPE_TOLERANCE",
    "SLOPE_TOLERANCE",
    "Bounds",
    "CaseSlope",
    "Check",
    "Rules",
    "Slope",
    "allowed_pairs",
    "appended",
    "backward",
    "bounds",
    "captured_bounds",
    "captured_gradients",
    "case_slope",
    "check",
    "dequantized_rows",
    "dropout_mask",
    "forward",
    "forward_cached",
    "pooled_slope",
    "quantization_error",
    "quantized",
    "quantized_packed_rows",
    "quantized_rows",
    "rotation",
    "rounded_backward",
    "rounded_captured_gradients",
    "rounded_forward",
    "rounding_error",
    "turned",
    "values_of",
]
