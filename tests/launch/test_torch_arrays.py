"""Outputs for torch tensors: straight from the allocator where that is known to mean the same device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter, with the quick way of the CPU in place of the GPU's; ``made`` counts how often it was taken."""
    from flashgen.launch.arrays import torch_arrays

    quick = torch._C._dynamo.guards._empty_strided_cpu
    adapter = torch_arrays.TorchArrays()
    adapter.made = []

    def counted(*arguments: Any) -> Any:
        adapter.made.append(arguments)
        return quick(*arguments)

    monkeypatch.setattr(torch_arrays, "_empty_on_gpu", counted)
    return adapter


@pytest.mark.parametrize("current", [0, 1, None])
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 3, 4), (0,), (2, 0, 4, 8)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_both_ways_make_the_same_tensor(arrays: Any, shape: tuple[int, ...], dtype: str, current: int | None) -> None:
    from flashgen.launch.arrays.torch_arrays import _DTYPES

    arrays._current_device = lambda: current
    # Says that it is on GPU 0, and makes tensors of the CPU.
    zeros = torch.zeros(2, 8, dtype=torch.float16, requires_grad=True)
    like = SimpleNamespace(is_cuda=True, get_device=lambda: 0, new_empty_strided=zeros.new_empty_strided)
    (made,), (pointer,) = arrays.allocate(like, [arrays.layout(shape, dtype)], 0)
    assert pointer == made.data_ptr()
    expected = torch.empty(shape, dtype=_DTYPES[dtype])
    assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device)
    assert made.is_contiguous()
    assert not made.requires_grad
    assert len(arrays.made) == (current == 0)


def test_inference_mode_is_kept(arrays: Any) -> None:
    arrays._current_device = lambda: -1

    def made() -> Any:
        return arrays.allocate(torch.zeros(2), [arrays.layout((2,), "fp32")], 0)[0][0]

    with torch.inference_mode():
        assert made().is_inference()
    assert not made().is_inference()


def _plain() -> Any:
    return torch.ones(1, 32, 2, 16)


#: Tensors that look like ``_plain()`` but for one thing, and what is said of them.
REFUSED = {
    "negated": (lambda: torch._neg_view(_plain()), "negated view"),
    "on no device": (lambda: _plain().to("meta"), "has no memory"),
    "zeros without memory": (lambda: torch._efficientzerotensor((1, 32, 2, 16)), "has no memory"),
    "sparse": (lambda: _plain().to_sparse(), "cannot be read as a torch array"),
    "complex": (lambda: _plain().to(torch.complex64).conj(), "complex64"),
    "integers": (lambda: _plain().int(), "int32"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_are_not_as_they_lie_in_memory_are_refused_each_time(case: str, place: int) -> None:
    from flashgen.errors import ArgumentError
    from tests.launch.on_host import executor

    make, words = REFUSED[case]
    run, tensors = executor(), [_plain(), _plain(), _plain()]
    run.forward(*tensors)
    tensors[place] = make()
    for found in (run, executor()):
        with pytest.raises(ArgumentError, match=f"{'qkv'[place]} .*{words}"):
            found.forward(*tensors)


def test_parameters_and_tensors_that_want_gradients_are_plain() -> None:
    from tests.launch.on_host import executor

    executor().forward(torch.nn.Parameter(_plain()), _plain().requires_grad_(), _plain())
