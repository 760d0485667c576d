"""One row per element type: what it is called in specs, CUDA and NumPy, and how wide it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class DType(NamedTuple):
    """An element type that kernels read and write."""

    name: str
    cuda: str
    bytes: int
    #: Unit roundoff: half the distance from 1 to the next representable number.
    epsilon: float
    #: How other libraries spell it, lower case.
    aliases: tuple[str, ...]

    @property
    def is_half(self) -> bool:
        """Whether tensor cores take it as a 16-bit operand."""
        return self.bytes == 2

    @property
    def is_eight_bit(self) -> bool:
        """Whether it is an 8-bit float, whose arrays come with scales."""
        return self.bytes == 1

    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (bf16 and the 8-bit types come from ml_dtypes, imported only here)."""
        import numpy

        dtype: np.dtype[Any]
        if self.name in _OF_ML_DTYPES:
            import ml_dtypes

            dtype = numpy.dtype(getattr(ml_dtypes, _OF_ML_DTYPES[self.name]))
        else:
            dtype = numpy.dtype({"fp16": "float16", "fp32": "float32", "fp64": "float64"}[self.name])
        return dtype


FP16 = DType("fp16", "half_t", 2, 2.0**-11, ("fp16", "float16", "half", "f16"))
BF16 = DType("bf16", "bfloat16_t", 2, 2.0**-8, ("bf16", "bfloat16"))
FP32 = DType("fp32", "float32_t", 4, 2.0**-24, ("fp32", "float32", "float", "f32"))
FP64 = DType("fp64", "double", 8, 2.0**-53, ("fp64", "float64", "double", "f64"))
E4M3 = DType("e4m3", "e4m3_t", 1, 2.0**-4, ("e4m3", "float8_e4m3fn"))
E5M2 = DType("e5m2", "e5m2_t", 1, 2.0**-3, ("e5m2", "float8_e5m2"))
_OF_ML_DTYPES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}

DTYPES: dict[str, DType] = {d.name: d for d in (FP16, BF16, FP32)}
#: What queries, keys and values may hold: e4m3 in forward kernels alone.
INPUTS: dict[str, DType] = {**DTYPES, E4M3.name: E4M3}
#: What O may hold where queries, keys and values are e4m3; the first is the default.
EIGHT_BIT_OUTPUTS: dict[str, DType] = {d.name: d for d in (BF16, FP16)}
#: What arrays that calls return may hold: captured tensors, and so their gradients, may be wider; e4m3 is quantized.
RESULTS: dict[str, DType] = {**DTYPES, FP64.name: FP64, E4M3.name: E4M3}
#: What a cache may hold in place of the queries' dtype.
CACHE_DTYPES: dict[str, DType] = {d.name: d for d in (E4M3, E5M2)}
#: What arrays that calls take may hold.
ARGUMENTS: dict[str, DType] = {**RESULTS, **CACHE_DTYPES}
ALIASES: dict[str, DType] = {alias: d for d in (*DTYPES.values(), *CACHE_DTYPES.values()) for alias in d.aliases}
