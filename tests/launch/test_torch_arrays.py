"""Outputs for torch tensors: straight from the allocator where that is known to mean the same device."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter, with the quick way of the CPU in place of the GPU's; ``made`` counts how often it was taken."""
    from flashgen.launch import torch_arrays

    quick = torch._C._dynamo.guards._empty_strided_cpu
    adapter = torch_arrays.TorchArrays()
    adapter.made = []

    def counted(*arguments: Any) -> Any:
        adapter.made.append(arguments)
        return quick(*arguments)

    monkeypatch.setattr(torch_arrays, "_empty_on_gpu", counted)
    return adapter


@pytest.mark.parametrize("current", [-1, 0, None])
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 3, 4), (0,), (2, 0, 4, 8)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_both_ways_make_the_same_tensor(arrays: Any, shape: tuple[int, ...], dtype: str, current: int | None) -> None:
    from flashgen.launch.torch_arrays import _DTYPES

    arrays._current_device = lambda: current
    like = torch.zeros(2, 8, dtype=torch.float16, requires_grad=True)
    (made,), (pointer,) = arrays.allocate(like, [arrays.layout(shape, dtype)], 0)
    assert pointer == made.data_ptr()
    expected = torch.empty(shape, dtype=_DTYPES[dtype])
    assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device)
    assert made.is_contiguous()
    assert not made.requires_grad
    # A CPU tensor says that it is on device -1.
    assert len(arrays.made) == (current == -1)


def test_inference_mode_is_kept(arrays: Any) -> None:
    arrays._current_device = lambda: -1

    def made() -> Any:
        return arrays.allocate(torch.zeros(2), [arrays.layout((2,), "fp32")], 0)[0][0]

    with torch.inference_mode():
        assert made().is_inference()
    assert not made().is_inference()
