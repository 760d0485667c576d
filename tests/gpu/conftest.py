"""Tensors with poison around them, and the oracle's verdict on what a kernel makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan.varlen import COUNTS, STARTS
from flashgen.verify.cases.case import Inputs
from flashgen.verify.cases.packed import Packing, packed_results
from flashgen.verify.rounding import rounding_errors

try:
    import torch
except ImportError:
    # Tests of this folder need both a GPU and torch, and skip themselves; their fixtures must still import.
    torch = None

DEVICE = "cuda"
_MARGIN = 512
_guards: list[tuple[Any, int]] = []


def torch_dtype(spec: fg.AttentionSpec) -> Any:
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[spec.dtype]


@pytest.fixture(autouse=True)
def guarded_outputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every output starts as NaN, so that unwritten elements show, between margins that nobody may touch.

    Workspaces of a call are one: the emulator looks at the ends of each.
    """
    if torch is None or "plain_outputs" in request.fixturenames:
        yield
        return
    from flashgen.launch.arrays import torch_arrays

    def guarded(like: Any, shape: Any, dtype: Any) -> Any:
        count = int(np.prod(shape))
        flat = like.new_empty(count + 2 * _MARGIN, dtype=dtype).fill_(torch.nan)
        flat[:_MARGIN] = 7
        flat[_MARGIN + count :] = 7
        _guards.append((flat, count))
        return flat[_MARGIN : _MARGIN + count].view(shape)

    def allocate(self: Any, like: Any, layouts: Any, stream: int) -> Any:
        made = [guarded(like, shape, dtype) for shape, _, dtype in layouts]
        return made, [x.data_ptr() for x in made]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_arrays.TorchArrays, "allocate", allocate)
        yield


@pytest.fixture
def plain_outputs() -> None:
    """For tests that look at how outputs are allocated: no margins around them."""


def check_margins() -> None:
    """No kernel wrote outside its outputs since the last check."""
    for flat, count in _guards:
        assert (flat[:_MARGIN].float() == 7).all(), "a kernel wrote before an output"
        assert (flat[_MARGIN + count :].float() == 7).all(), "a kernel wrote behind an output"
    _guards.clear()


@pytest.fixture(autouse=True)
def whole_margins() -> Iterator[None]:
    _guards.clear()
    yield
    check_margins()


class Maker:
    """Random tensors in any layout; what lies between their elements is NaN."""

    layouts = ("contiguous", "heads first", "wide rows", "unaligned", "one batch")

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator(DEVICE).manual_seed(seed)

    def __call__(self, spec: fg.AttentionSpec, *shape: int, layout: str = "contiguous", size: float = 1.0) -> Any:
        dtype, (batch, length, heads, dim) = torch_dtype(spec), shape

        def poison(*extents: int) -> Any:
            return torch.full(extents, torch.nan, dtype=dtype, device=DEVICE)

        if layout == "heads first":
            x = poison(batch, heads, length, dim).transpose(1, 2)
        elif layout == "wide rows":
            x = poison(batch, length, heads, dim + 16)[..., :dim]
        elif layout == "unaligned":
            x = poison(batch, length, heads, dim + 2)[..., 1 : dim + 1]
        elif layout == "one batch":
            x = poison(min(batch, 1), length, heads, dim)
        else:
            x = poison(batch, length, heads, dim)
        values = torch.randn(x.shape, generator=self.random, device=DEVICE) * size
        x.copy_(values.to(dtype))
        return x.expand(shape) if layout == "one batch" else x


@pytest.fixture
def make() -> Maker:
    return Maker()


#: Of calls of specs with dropout.
DROPOUT = fg.Dropout(0.2, 2**62 + 3, 2**36 + 8)


def plain(x: Any) -> Any:
    """For the oracle: the same numbers in NumPy."""
    return x.detach().float().cpu().numpy()


def verify(
    spec: fg.AttentionSpec, q: Any, k: Any, v: Any, do: Any = None, scale: float | None = None
) -> tuple[Any, ...]:
    """Runs a kernel and holds every result against the oracle; returns the results."""
    kernel = fg.build(spec)
    dropout = DROPOUT if spec.dropout else None
    if spec.varlen:
        return verify_packed(spec, q, k, v, do, scale, dropout)
    results = kernel(q, k, v, scale=scale, dropout=dropout)
    if do is not None:
        results += kernel.backward(do, q, k, v, *results, scale=scale, dropout=dropout)
    judge(spec, q, k, v, do, scale, results)
    check_margins()
    return results


def verify_packed(
    spec: fg.AttentionSpec, q: Any, k: Any, v: Any, do: Any, scale: float | None, dropout: fg.Dropout | None
) -> tuple[Any, ...]:
    """The same with sequences cut to drawn lengths."""
    kernel, len_q, len_kv = fg.build(spec), q.shape[1], k.shape[1]
    packing = Packing.drawn(3, q.shape[0], len_q, len_kv)
    given = packing.sequences(len_q, len_kv)
    arrays = {name: getattr(given, name) for name in (*STARTS, *COUNTS)}
    on_device = {n: torch.from_numpy(x).to(q.device) for n, x in arrays.items() if x is not None}
    more = {"scale": scale, "dropout": dropout, "sequences": replace(given, **on_device)}

    def packed(x: Any, side: int) -> Any:
        return torch.from_numpy(packing.pack(plain(x), side)).to(x.device, x.dtype)

    arguments = packed(q, 0), packed(k, 1), packed(v, 1)
    results = kernel(*arguments, **more)
    if do is not None:
        results += kernel.backward(packed(do, 0), *arguments, *results, **more)
    unpacked = packed_results([plain(x) for x in results], packing, len_q, len_kv)
    judge(spec, q, k, v, do, scale, tuple(torch.from_numpy(x) for x in unpacked), lengths=packing.used)
    return results


def judge(
    spec: fg.AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    scale: float | None,
    results: tuple[Any, ...],
    lengths: Any = None,
) -> None:
    """Fails unless every result is within its bound, and none is off by a factor."""
    arrays = [plain(x) for x in (q, k, v)]
    gradient = None if do is None else plain(do)
    dropout = DROPOUT if spec.dropout else None
    exact = fg.oracle.forward(spec, *arrays, scale=scale, dropout=dropout, lengths=lengths)
    if do is not None:
        exact += fg.oracle.backward(spec, *arrays, gradient, scale=scale, dropout=dropout, lengths=lengths)
    limits = fg.oracle.bounds(spec, *arrays, gradient, scale, exact=exact, dropout=dropout, lengths=lengths)
    # On drawn values the one run that the bounds compare with can be right by accident.
    known = Inputs(*arrays, np.zeros((*arrays[0].shape[:3], spec.head_dim_v)) if gradient is None else gradient)
    reach = rounding_errors(spec, known, spec.default_scale if scale is None else scale, exact, dropout, lengths)
    for name, result, reference in zip(("o", "lse", "dq", "dk", "dv"), results, exact, strict=False):
        bound = np.maximum(getattr(limits, name), reach[name])
        found = fg.oracle.check(plain(result), reference, bound, exact_infinity=name == "lse")
        assert found.ok, f"{name}: {found}"
        of_case = fg.oracle.case_slope(
            plain(result), reference, bound, getattr(limits.rounded, name), limits.rounded.pairs
        )
        tolerance = fg.oracle.LSE_SLOPE_TOLERANCE if name == "lse" else fg.oracle.SLOPE_TOLERANCE
        slope = fg.oracle.pooled_slope([of_case], tolerance)
        assert slope is None or slope.ok, f"{name}: {slope}"


@pytest.fixture(name="verify")
def verify_fixture() -> Any:
    return verify


@pytest.fixture(name="judge")
def judge_fixture() -> Any:
    return judge


@pytest.fixture(name="maker", scope="session")
def maker_fixture() -> Any:
    return Maker
