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

    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (bf16 comes from ml_dtypes, imported only here)."""
        import numpy

        dtype: np.dtype[Any]
        if self.name == "bf16":
            import ml_dtypes

            dtype = numpy.dtype(ml_dtypes.bfloat16)
        else:
            dtype = numpy.dtype({"fp16": "float16", "fp32": "float32", "fp64": "float64"}[self.name])
        return dtype


FP16 = DType("fp16", "half_t", 2, 2.0**-11, ("fp16", "float16", "half", "f16"))
BF16 = DType("bf16", "bfloat16_t", 2, 2.0**-8, ("bf16", "bfloat16"))
FP32 = DType("fp32", "float32_t", 4, 2.0**-24, ("fp32", "float32", "float", "f32"))
FP64 = DType("fp64", "double", 8, 2.0**-53, ("fp64", "float64", "double", "f64"))

DTYPES: dict[str, DType] = {d.name: d for d in (FP16, BF16, FP32)}
#: What arrays that calls return may hold: captured tensors, and so their gradients, may be wider.
RESULTS: dict[str, DType] = {**DTYPES, FP64.name: FP64}
ALIASES: dict[str, DType] = {alias: d for d in DTYPES.values() for alias in d.aliases}
