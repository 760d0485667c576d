"""Standard attention: S, P and dS of all pairs in device memory. Drawn cases are in test_properties.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.launch.arrays.foreign_arrays import ForeignArrays
from flashgen.launch.arrays.numpy_arrays import NumpyArrays
from flashgen.launch.call.probabilities import check_narrowable
from flashgen.launch.variant import Loadable
from flashgen.manifest import manifest
from flashgen.plan import plan

STANDARD = fg.Schedule(algorithm="standard")
CAUSAL = fg.AttentionSpec(16, dtype="fp32", mask=fg.causal())
Array = np.ndarray[Any, Any]


def built(spec: fg.AttentionSpec, schedule: fg.Schedule = STANDARD) -> fg.Kernel:
    return fg.build(spec, schedule=schedule, arch="sm_80", target="emulator")


def arrays(len_q: int, len_kv: int, heads: int = 2, dtype: str = "float32") -> tuple[Array, ...]:
    random = np.random.default_rng(0)
    q, do = random.standard_normal((2, 1, len_q, heads, 16)).astype(dtype)
    k, v = random.standard_normal((2, 1, len_kv, 1, 16)).astype(dtype)
    return q, k, v, do


def probabilities(q: Array, k: Array, *, is_causal: bool = True) -> Array:
    """P of the oracle, whose formula is short enough to be written again."""
    scores = np.einsum("bqhd,bkd->bhqk", q.astype(np.float64), k[:, :, 0]) / 4.0
    if is_causal:
        queries, keys = np.indices(scores.shape[2:])
        scores[..., keys - queries > k.shape[1] - q.shape[1]] = -np.inf
    weights = np.exp(scores)
    total = weights.sum(axis=-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


# ---- The plan


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (fg.AttentionSpec(192), "its head dims end at 128; use algorithm='fa2', or leave algorithm out"),
        (fg.AttentionSpec(64, mask=fg.dilated(2)), "its masks are full, causal and windows"),
        (fg.AttentionSpec(64, score=fg.softcap(30.0)), "it has no scores"),
        (fg.AttentionSpec(64, varlen=True), "its sequences are equally long"),
    ],
)
def test_specs_beyond_the_algorithm_are_refused_with_the_remedy(spec: fg.AttentionSpec, message: str) -> None:
    with pytest.raises(fg.PlanError, match=message):
        plan(spec, STANDARD)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_q": 64}, "algorithm='standard' has no tile_q to choose; leave tile_q out"),
        ({"stages": 2}, "algorithm='standard' has no stages to choose; leave stages out"),
        (
            {"backward": fg.BackwardSchedule(tile_q=64)},
            "algorithm='standard' has no tiles of a backward pass to choose; leave backward out",
        ),
    ],
)
def test_a_schedule_for_tiles_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(fg.PlanError, match=message):
        plan(fg.AttentionSpec(64), fg.Schedule(algorithm="standard", **fields))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_both_passes_have_kernels_of_their_own_on_every_gpu(arch: str) -> None:
    kernels = plan(fg.AttentionSpec(64, dtype="fp16", mask=fg.causal()), STANDARD, arch).kernels
    assert [kernel.role for kernel in kernels] == ["scores", "softmax", "forward", "prepare", "ds", "dv", "dq", "dk"]
    assert {kernel.algorithm for kernel in kernels} == {"standard attention"}


def test_a_manifest_tells_where_s_p_and_ds_lie() -> None:
    attention = plan(fg.AttentionSpec(64, dtype="fp16"), STANDARD)
    entries = manifest(attention, {kernel.role: Loadable(kernel, None) for kernel in attention.kernels})["kernels"]
    extents = ["batch", "heads_q", "len_q", "score_pitch"]
    assert {entry["role"]: entry["workspaces"] for entry in entries if entry["workspaces"]} == {
        "scores": [{"param": "scores", "element": "fp32", "extents": extents}],
        "softmax": [{"param": "probabilities", "element": "fp16", "extents": extents}],
        "ds": [{"param": "dscores", "element": "fp16", "extents": extents}],
    }


# ---- P


@pytest.mark.parametrize(("len_q", "len_kv"), [(40, 53), (30, 20), (9, 64), (1, 1)])
def test_p_is_returned_before_dropout(len_q: int, len_kv: int) -> None:
    q, k, v, _ = arrays(len_q, len_kv)
    out, lse, p = built(CAUSAL)(q, k, v, return_p=True)
    assert p.shape == (1, 2, len_q, len_kv)
    np.testing.assert_allclose(p, probabilities(q, k), atol=1e-6)
    dropping = built(fg.AttentionSpec(16, dtype="fp32", mask=fg.causal(), dropout=True))
    dropped, same_lse, same_p = dropping(q, k, v, return_p=True, dropout=fg.Dropout(0.5, 7))
    np.testing.assert_array_equal(same_p, p)
    np.testing.assert_array_equal(same_lse, lse)
    assert len_kv == 1 or not np.array_equal(dropped, out)


@pytest.mark.parametrize("dropout", [None, fg.Dropout(0.3, 5)])
def test_gradients_from_a_stored_p_are_those_from_a_p_computed_again(dropout: fg.Dropout | None) -> None:
    kernel = built(fg.AttentionSpec(16, dtype="fp16", mask=fg.window(20, 3), dropout=dropout is not None))
    q, k, v, do = arrays(37, 45, dtype="float16")
    more: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
    out, lse, p = kernel(q, k, v, return_p=True, **more)
    lse_before = lse.copy()
    again = kernel.backward(do, q, k, v, out, lse, **more)
    stored = kernel.backward(do, q, k, v, out, lse, p=p, **more)
    for one, other in zip(again, stored, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(lse, lse_before)


def test_a_backward_call_reads_the_p_that_it_is_given() -> None:
    kernel = built(CAUSAL)
    q, k, v, do = arrays(20, 24)
    out, lse, p = kernel(q, k, v, return_p=True)
    p[...] = 0.0
    assert all(not gradient.any() for gradient in kernel.backward(do, q, k, v, out, lse, p=p))


def test_what_lies_in_the_padding_of_p_reaches_no_gradient() -> None:
    kernel = built(CAUSAL)
    q, k, v, do = arrays(20, 21)
    out, lse, p = kernel(q, k, v, return_p=True)
    expected = kernel.backward(do, q, k, v, out, lse, p=p)
    p.base[..., 21:] = np.nan
    for one, other in zip(kernel.backward(do, q, k, v, out, lse, p=p), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_backward_pass_is_reproducible_for_any_order_of_threads() -> None:
    q, k, v, do = arrays(70, 50, heads=3)
    found = []
    for options in ({}, {"schedule": "random", "seed": 3}, {"schedule": "reverse", "race": True}):
        kernel = built(CAUSAL)
        kernel.target.options = options  # type: ignore[attr-defined]
        try:
            found.append(kernel.backward(do, q, k, v, *kernel(q, k, v)))
        finally:
            kernel.target.options = {}  # type: ignore[attr-defined]
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("algorithm", ["naive", "fa2", None])
def test_other_algorithms_have_no_p_to_return_or_to_read(algorithm: Any) -> None:
    kernel = built(CAUSAL, fg.Schedule(algorithm=algorithm))
    q, k, v, do = arrays(5, 6)
    with pytest.raises(fg.ArgumentError, match=r"return_p=True needs a kernel that stores P, and .* never does; build"):
        kernel(q, k, v, return_p=True)
    with pytest.raises(fg.ArgumentError, match=r"p needs a kernel that stores P, .*Schedule\(algorithm='standard'\)"):
        kernel.backward(do, q, k, v, *kernel(q, k, v), p=np.zeros((1, 2, 5, 6), np.float32))


def test_a_p_of_another_layout_is_refused() -> None:
    kernel = built(CAUSAL)
    q, k, v, do = arrays(5, 6)
    out, lse, p = kernel(q, k, v, return_p=True)
    wrong = {
        "p is fp32 of shape (1, 2, 5, 5); with these q and k it must be fp32 of shape (1, 2, 5, 6)": p[..., :5],
        "p is fp16 of shape (1, 2, 5, 6)": p.astype("float16"),
        "p has strides (0, 30, 6, 1), and must have (80, 40, 8, 1)": np.ascontiguousarray(p),
    }
    for message, array in wrong.items():
        with pytest.raises(fg.ArgumentError) as error:
            kernel.backward(do, q, k, v, out, lse, p=array)
        assert message in str(error.value)
    with pytest.raises(fg.ArgumentError, match="return_p=1 is not a bool"):
        kernel(q, k, v, return_p=1)  # type: ignore[arg-type]


def test_p_is_returned_in_libraries_whose_arrays_can_be_narrowed() -> None:
    check_narrowable(NumpyArrays())
    with pytest.raises(fg.ArgumentError, match="return_p=True needs arrays of torch, CuPy or NumPy"):
        check_narrowable(ForeignArrays())


# ---- The softmax


def test_rows_that_registers_do_not_hold_are_read_twice() -> None:
    kernel = built(fg.AttentionSpec(16, dtype="fp32", mask=fg.full(), direction="forward"))
    q, k, v, _ = arrays(2, 5200, heads=1)
    k[:, 5000] *= 8.0
    out, lse, p = kernel(q, k, v, return_p=True)
    exact, exact_lse = fg.oracle.forward(kernel.spec, q, k, v)
    np.testing.assert_allclose(p, probabilities(q, k, is_causal=False), atol=1e-6)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)
