"""Gradients of captured tensors: of every named score, under masks with holes, the same bits in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.cache import default_cache
from flashgen.compile import compile_source
from flashgen.expr import exp, sigmoid, where
from flashgen.plan import plan
from flashgen.render import render
from flashgen.spec import Mask, score
from flashgen.spec.masks import named as masks
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

RNG = np.random.default_rng(0)
BATCH, HEADS = 2, 4
SLOPES = np.array([0.5, 0.25, 0.1, 1], np.float32)
LOGITS = np.array([0.5, -2, 4, -np.inf], np.float32)
TABLE = RNG.standard_normal((HEADS, 41)).astype(np.float32)
IDS = np.sort(RNG.integers(0, 4, (BATCH, 150))).astype(np.int32)
UNSORTED = RNG.integers(0, 3, (BATCH, 150)).astype(np.int32)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(dtype)


PER_KEY, PER_QUERY, ANYWHERE = normal(150), normal(150, BATCH), normal(150)
KEY_FIRST = normal(150, 150, dtype=np.float16)
LARGER = normal(BATCH, HEADS + 1, 160, 170)
LIMITS = normal(150)


@dataclass(frozen=True)
class Case:
    score: Any
    mask: Any = field(default_factory=fg.full)
    len_q: int = 70
    len_kv: int = 90
    heads_kv: int = 2
    dtype: str = "bf16"
    head_dim: int = 32
    deterministic: bool = False
    arch: str = "sm_80"


ALL = score.softcap(3.0) >> score.alibi(SLOPES) >> score.relative_bias(TABLE) >> score.sink(LOGITS)
CASES: dict[str, Case] = {
    "alibi": Case(score.alibi(SLOPES), fg.causal()),
    "alibi, by sequence": Case(score.alibi(normal(BATCH, HEADS)), heads_kv=1, deterministic=True),
    "bias of all four": Case(score.bias(normal(BATCH, HEADS, 70, 90)), fg.causal()),
    "bias for all": Case(score.bias(normal(70, 90)), fg.window(30, 5)),
    "bias of heads": Case(score.bias(normal(HEADS, 70, 90)), masks.chunked(40), heads_kv=4),
    "bias of sequences": Case(score.bias(normal(BATCH, 1, 70, 90)), masks.document(IDS[:, :70], IDS[:, 60:])),
    "bias per key": Case(score.bias(normal(BATCH, 1, 1, 90)), fg.causal()),
    "bias with more elements than pairs": Case(score.bias(LARGER), fg.window(20, 10)),
    "bias of one slice": Case(lambda s, b, h, q, k: s + LARGER[1, h, q, k]),
    "bias, keys first": Case(lambda s, b, h, q, k: s + KEY_FIRST[k, q], fg.causal()),
    "relative bias": Case(score.relative_bias(TABLE), fg.window(40, 40)),
    "relative bias for all heads": Case(score.relative_bias(normal(9)), len_q=40, len_kv=33),
    "sink": Case(score.sink(LOGITS), fg.causal(), len_q=100),
    "everything": Case(ALL, fg.causal() & masks.document(IDS), len_q=150, len_kv=150),
    "everything in fp32": Case(ALL >> score.bias(normal(70, 90)), fg.causal(), dtype="fp32", head_dim=20),
    "everything on Turing": Case(ALL >> score.bias(normal(70, 90)), fg.causal(), dtype="fp16", arch="sm_75"),
    "wide heads": Case(ALL >> score.bias(normal(70, 90)), fg.causal(), head_dim=136),
    "a factor per key": Case(lambda s, b, h, q, k: s * sigmoid(PER_KEY[k]), masks.global_tokens(5) | fg.window(9, 0)),
    "rows and two loads": Case(
        lambda s, b, h, q, k: s * exp(PER_QUERY[q, b]) + PER_KEY[k] * PER_KEY[k // 2], masks.document(UNSORTED)
    ),
    "anywhere": Case(lambda s, b, h, q, k: s + ANYWHERE[(q * k) % 150], masks.dilated(3)),
    "a branch": Case(lambda s, b, h, q, k: where(q > k, s * SLOPES[h], s - SLOPES[0])),
    "score and sink": Case(score.alibi(SLOPES) >> score.sink(SLOPES), masks.key_padding(np.array([3, 0], np.int32))),
    "bfloat16 slopes": Case(score.alibi(SLOPES.astype(ml_dtypes.bfloat16))),
    "float16 slopes": Case(score.alibi(SLOPES.astype(np.float16)), arch="sm_75", dtype="fp16"),
    "float64 bias": Case(score.bias(normal(70, 90, dtype=np.float64)), masks.prefix_lm(20)),
    "float64 slopes": Case(score.alibi(SLOPES.astype(np.float64))),
    "also in the mask": Case(score.alibi(SLOPES), lambda b, h, q, k: (LIMITS[k] < 0.5) | (k < 2)),
}


def inputs(case: Case, spec: fg.AttentionSpec) -> list[Any]:
    rng = np.random.default_rng(1)
    q_shape = BATCH, case.len_q, HEADS, spec.head_dim
    kv_shape = BATCH, case.len_kv, case.heads_kv, spec.head_dim
    return [rng.standard_normal(shape).astype(spec.element.numpy()) for shape in (q_shape, kv_shape, kv_shape, q_shape)]


def built(case: Case) -> fg.Kernel:
    spec = fg.AttentionSpec(
        case.head_dim, dtype=case.dtype, mask=case.mask, score=case.score, deterministic=case.deterministic
    )
    return fg.build(spec, arch=case.arch, target="emulator")


def gradients(kernel: fg.Kernel, arrays: list[Any], **options: Any) -> dict[str, Any]:
    q, k, v, do = arrays
    kernel.target.options = options
    try:
        o, lse = kernel(q, k, v)
        return kernel.backward(do, q, k, v, o, lse, captured_gradients=True)[3]
    finally:
        kernel.target.options = {}


#: A developer's run takes one case of each kind, most of them built for other tests anyway, and fewer compilations
#: below; DRAWN_CASES=ci takes all.
ORDERED = ("everything", "rows and two loads", "anywhere", "bias for all", "score and sink")
WATCHED = ("everything", "rows and two loads", "everything on Turing")
SAMPLE = (
    "everything",
    "rows and two loads",
    "score and sink",
    "bias of all four",
    "everything in fp32",
    "wide heads",
)


@pytest.mark.parametrize("name", some(CASES, *SAMPLE))
def test_they_agree_with_the_oracle(name: str) -> None:
    kernel = built(CASES[name])
    arrays = inputs(CASES[name], kernel.spec)
    found = gradients(kernel, arrays)
    exact = oracle.captured_gradients(kernel.spec, *arrays)
    rounded = oracle.rounded_captured_gradients(kernel.spec, *arrays)
    assert sorted(found) == sorted(exact)
    for tensor, bound in oracle.captured_bounds(kernel.spec, *arrays, exact=exact).items():
        assert found[tensor].dtype == kernel.spec.tensors[tensor].dtype
        check = oracle.check(found[tensor], exact[tensor], bound)
        assert check.ok, (tensor, check)
        slope = oracle.pooled_slope([oracle.case_slope(found[tensor], exact[tensor], bound, rounded[tensor])])
        assert slope is None or slope.ok, (tensor, slope)


ORDERS: list[dict[str, Any]] = [
    {"schedule": "reverse"},
    {"schedule": "random", "seed": 1},
    {"schedule": "random", "seed": 2, "resident": 4},
    {"schedule": "priority", "seed": 3},
]


@pytest.mark.parametrize("name", some(ORDERED, "everything", "rows and two loads", "score and sink"))
def test_the_same_bits_in_any_order(name: str) -> None:
    kernel = built(CASES[name])
    arrays = inputs(CASES[name], kernel.spec)
    expected = gradients(kernel, arrays)
    for options in ORDERS:
        for tensor, gradient in gradients(kernel, arrays, **options).items():
            assert gradient.tobytes() == expected[tensor].tobytes(), (tensor, options)


@pytest.mark.parametrize("name", some(WATCHED, "rows and two loads"))
def test_no_races(name: str) -> None:
    kernel = built(CASES[name])
    arrays = inputs(CASES[name], kernel.spec)
    expected = gradients(kernel, arrays)
    for tensor, gradient in gradients(kernel, arrays, race=True).items():
        assert gradient.tobytes() == expected[tensor].tobytes(), tensor


def test_the_other_gradients_are_those_of_a_call_without() -> None:
    case = CASES["everything"]
    kernel = built(Case(case.score, case.mask, deterministic=True))
    q, k, v, do = inputs(case, kernel.spec)
    o, lse = kernel(q, k, v)
    plain = kernel.backward(do, q, k, v, o, lse)
    assert len(plain) == 3
    *others, _ = kernel.backward(do, q, k, v, o, lse, captured_gradients=True)
    for expected, found in zip(plain, others, strict=True):
        assert found.tobytes() == expected.tobytes()


def test_without_captured_floats_there_is_nothing_to_give() -> None:
    kernel = built(Case(None, masks.document(IDS)))
    assert gradients(kernel, inputs(CASES["alibi"], kernel.spec)) == {}
    assert not [k.role for k in kernel.plan.kernels if k.captured is not None]


def test_no_kernels_for_them_without_a_backward_pass() -> None:
    spec = fg.AttentionSpec(32, score=ALL, direction="forward")
    assert [k.role for k in fg.build(spec, target="emulator").plan.kernels] == ["forward"]


@pytest.mark.parametrize("name", some(["alibi", "bias of all four", "rows and two loads"], "rows and two loads"))
def test_non_finite_keys_that_no_query_attends_to_change_no_result(name: str) -> None:
    padding = masks.key_padding(np.array([50, 50], np.int32))
    case = CASES[name]
    kernel = built(Case(case.score, Mask.of(case.mask) & padding, case.len_q, case.len_kv))
    arrays = inputs(case, kernel.spec)
    expected = gradients(kernel, arrays)
    for array in arrays[1:3]:
        array[0, 50:], array[1, 50:] = np.nan, np.inf
    for tensor, gradient in gradients(kernel, arrays).items():
        assert gradient.tobytes() == expected[tensor].tobytes()


def test_a_non_finite_key_that_is_attended_to_makes_its_gradient_nan() -> None:
    case = CASES["bias of all four"]
    kernel = built(case)
    arrays = inputs(case, kernel.spec)
    arrays[2][1, 60, 1] = np.nan
    (gradient,) = gradients(kernel, arrays).values()
    reached = np.zeros(gradient.shape, bool)
    # Causal: of queries from 40 on, key 60 is seen, and D takes the NaN to all keys that those see.
    queries, keys = np.arange(70)[:, None], np.arange(90)[None, :]
    reached[1, 2:] = (queries + 20 >= 60) & (keys <= queries + 20)
    np.testing.assert_array_equal(np.isnan(gradient), reached)


def test_tensors_given_to_a_call_have_their_own_shapes() -> None:
    kernel = built(CASES["bias with more elements than pairs"])
    case = CASES["bias with more elements than pairs"]
    arrays = inputs(case, kernel.spec)
    q, k, v, do = arrays
    (name,) = kernel.spec.tensors
    for shape in ((BATCH, HEADS, 70, 90), (BATCH + 1, HEADS, 71, 93)):
        bias = normal(*shape)[:, :, ::-1]
        o, lse = kernel(q, k, v, captured={name: bias})
        found = kernel.backward(do, q, k, v, o, lse, captured={name: bias}, captured_gradients=True)[3][name]
        exact = oracle.captured_gradients(kernel.spec, *arrays, captured={name: bias})
        bounds = oracle.captured_bounds(kernel.spec, *arrays, captured={name: bias}, exact=exact)
        assert oracle.check(found, exact[name], bounds[name]).ok


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0), (1, 1)])
@pytest.mark.parametrize("what", ["sums", "bias"])
def test_empty_and_single_sequences(what: str, len_q: int, len_kv: int) -> None:
    case = Case(ALL if what == "sums" else score.bias(normal(7, 9)), len_q=len_q, len_kv=len_kv)
    kernel = built(case)
    q, k, v, do = arrays = inputs(case, kernel.spec)
    o, lse = kernel(q, k, v)
    found = kernel.backward(do, q, k, v, o, lse, captured_gradients=True)[3]
    exact = oracle.captured_gradients(kernel.spec, *arrays)
    assert sorted(found) == sorted(exact)
    for name, bound in oracle.captured_bounds(kernel.spec, *arrays, exact=exact).items():
        assert oracle.check(found[name], exact[name], bound).ok


def test_their_kernels_are_compiled_when_they_are_first_wanted(tmp_path: Path) -> None:
    changed = score.alibi(SLOPES) >> score.sink(LOGITS)
    kernel = fg.build(fg.AttentionSpec(32, mask=fg.causal(), score=changed), arch="sm_80")
    roles = [k.role for k in kernel.plan.kernels]
    captured = ["captured_clear", "captured_pairs", "captured_sink", "captured_store"]
    assert roles[-4:] == captured
    assert list(kernel.source) == roles
    assert list(kernel.binaries) == roles[:-4]
    kernel.save(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.cubin")} == {k.name for k in kernel.plan.kernels}


COMPILED = [
    (head_dim, arch, dtype)
    for arch, dtype in (("sm_75", "fp16"), ("sm_80", "bf16"), ("sm_90", "bf16"), ("sm_80", "fp32"))
    for head_dim in (64, 128)
]


@pytest.mark.parametrize(("head_dim", "arch", "dtype"), some(COMPILED, COMPILED[3]))
def test_registers_suffice(head_dim: int, arch: str, dtype: str) -> None:
    function = ALL >> score.bias(normal(1, HEADS, 70, 90))
    attention = plan(fg.AttentionSpec(head_dim, dtype=dtype, mask=fg.causal(), score=function), arch=arch)
    kernels = [kernel for kernel in attention.kernels if kernel.captured is not None]
    assert len(kernels) == 5
    for kernel in kernels:
        binary, _ = default_cache().get_or_compile(render(kernel), compile_source)
        assert binary.resources.spill_bytes == 0, kernel.name
