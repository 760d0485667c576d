"""A GPU with torch's tensors."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.lab.timing.device import GpuDevice, Run

#: torch's name of each element type that NumPy knows by ml_dtypes, which torch does not read.
_VIEWS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class TorchDevice(GpuDevice):
    """A GPU whose arrays are torch tensors, on torch's current stream."""

    @property
    def stream(self) -> int:
        """torch's current stream."""
        return int(torch.cuda.current_stream(self.ordinal).cuda_stream)

    def put(self, array: Any) -> torch.Tensor:
        """A tensor on the GPU."""
        seen_as = _VIEWS.get(array.dtype.name)
        plain = array if seen_as is None else array.view(f"i{array.itemsize}")
        tensor = torch.from_numpy(plain).to(f"cuda:{self.ordinal}")
        return tensor if seen_as is None else tensor.view(seen_as)

    def get(self, array: Any) -> Any:
        """A NumPy copy of a tensor."""
        import ml_dtypes

        host = array.detach().cpu().contiguous()
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if host.dtype is torch.bfloat16 else host.numpy()

    def peak_bytes(self, run: Run) -> int:
        """The peak of torch's allocator."""
        torch.cuda.synchronize(self.ordinal)
        torch.cuda.reset_peak_memory_stats(self.ordinal)
        before = torch.cuda.memory_allocated(self.ordinal)
        kept = run()
        torch.cuda.synchronize(self.ordinal)
        del kept
        return int(torch.cuda.max_memory_allocated(self.ordinal)) - before

    def release(self) -> None:
        """Empties torch's cache of blocks."""
        torch.cuda.empty_cache()


def sees_gpus() -> bool:
    """Whether this torch runs on GPUs; some builds have none."""
    return torch.cuda.is_available()
