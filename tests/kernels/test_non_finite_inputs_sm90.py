"""NaN and infinity in the inputs of Hopper's kernels, on the emulator: only what depends on them changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Case, Mode
from tests.drawn import diagonal, some
from tests.kernels.test_backward_sm90 import DIMS, SPECS, built
from tests.kernels.test_forward_sm90 import HEAD_DIMS, IDS, NAME, forward_spec, launches

pytestmark = pytest.mark.in_turns(12)

NAMES = ("causal", "window", "documents")


def combined(dims: Sequence[Any]) -> list[tuple[str, Any]]:
    """Masks and head dims: a developer's run takes one mask for each, DRAWN_CASES=ci all."""
    return diagonal(NAMES, dims)


def agree(found: Any, clean: Any) -> bool:
    """Whether results are those of clean data, but for one rounding.

    A tile with results that are not finite is repeated. Its products with blocks that the mask cuts then add in another
    order, by mma.sync, which can leave out elements that are not finite.
    """
    a, b = found.astype(np.float64), clean.astype(np.float64)
    epsilon = float(ml_dtypes.finfo(clean.dtype).eps)
    return bool((np.abs(a - b) <= epsilon * np.abs(b) + 2.0**-20 * np.abs(b).max(initial=0.0)).all())


# ---- Results


@pytest.mark.parametrize(("name", "dims"), combined(some(HEAD_DIMS, *HEAD_DIMS[::2])))
def test_a_non_finite_key_reaches_exactly_the_queries_that_attend_to_it(name: str, dims: tuple[int, int]) -> None:
    """All other queries' results are those without the NaN or infinity, but for one rounding."""
    dim, dim_v = dims
    spec = forward_spec(dim, dim_v, **SPECS[name])
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(5)
    q, k, v = (random.standard_normal((2, 200, h, d)).astype(dtype) for h, d in ((4, dim), (2, dim), (2, dim_v)))
    captured = {n: x[:, :200] for n, x in spec.tensors.items()} or None
    v[:, 20:60, :, [9, dim_v - 2]] = -0.0
    clean, _ = kernel(q, k, v, captured=captured)
    bad = {30: (7, np.nan), 130: (dim_v - 1, np.inf), 199: (0, -np.inf)}
    for key, (column, value) in bad.items():
        v[:, key, :, column] = value
    k[:, 77, :, 3] = np.nan
    with launches(kernel, Mode("random", seed=dim)) as done:
        out, _ = kernel(q, k, v, captured=captured)
    assert done == {NAME}
    rules = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v))
    for b, h in np.ndindex(2, 4):
        allowed = rules.allowed(b, h)
        # A non-finite value reaches its own column; a bad score reaches every one.
        reached = np.repeat(allowed[:, 77:78], dim_v, axis=1)
        for key, (column, _) in bad.items():
            reached[:, column] |= allowed[:, key]
        assert reached.any()
        assert not reached.all()
        found, before = out[b, :, h], clean[b, :, h]
        assert not np.isfinite(found[reached].astype(np.float32)).any()
        assert agree(found[~reached], before[~reached])


#: Keys of the first head of the first sequence: in the tile that is computed first, in the last one, and in all.
NON_FINITE_KEYS = {"first": [450], "last": [3], "all": list(range(0, 460, 37))}
MODES = [Mode("random", seed=3), Mode(race=True), Mode("priority", seed=4, race=True)]
NON_FINITE_CASES = list(product(NAMES, NON_FINITE_KEYS, MODES))
NON_FINITE_CASES = some(NON_FINITE_CASES, *zip(NAMES, NON_FINITE_KEYS, MODES, strict=True))


@pytest.mark.parametrize("dims", some(HEAD_DIMS, *HEAD_DIMS[::2]))
def test_nan_in_values_is_detected_when_some_queries_are_nan_too(dims: tuple[int, int]) -> None:
    """The kernel detects NaN in V by the outputs it makes NaN. A NaN query makes them NaN by itself."""
    dim, dim_v = dims
    kernel = fg.build(forward_spec(dim, dim_v, mask=fg.causal()), arch="sm_90a", target="emulator")
    dtype, random = kernel.plan.spec.element.numpy(), np.random.default_rng(6)
    q, k, v = (random.standard_normal((2, 200, h, d)).astype(dtype) for h, d in ((2, dim), (2, dim), (2, dim_v)))
    rows = np.arange(200)
    no_numbers = np.stack([rows % 16 < 8, rows % 5 == 0])
    q[no_numbers] = np.nan
    clean, clean_lse = kernel(q, k, v)
    v[:, 100, :, dim_v - 1] = np.nan
    with launches(kernel, Mode("random", seed=dim)):
        out, lse = kernel(q, k, v)
    reached = np.zeros(out.shape, bool)
    reached[:, 100:, :, dim_v - 1] = True
    reached |= no_numbers[:, :, None, None]
    assert np.isnan(out[reached].astype(np.float32)).all()
    assert agree(out[~reached], clean[~reached])
    assert lse.tobytes() == clean_lse.tobytes()


@pytest.mark.parametrize(("name", "where", "mode"), NON_FINITE_CASES, ids=str)
def test_tiles_with_non_finite_values_are_repeated_and_others_keep_their_bits(
    name: str, where: str, mode: Mode
) -> None:
    """Blocks work on more tiles than may be under way."""
    spec = forward_spec(64, 64, **SPECS[name])
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(6)
    q, k, v = (random.standard_normal((2, 460, h, 64)).astype(dtype) for h in (6, 2, 2))
    clean, clean_lse = kernel(q, k, v)
    v[0, NON_FINITE_KEYS[where], 0, 5] = np.nan
    with launches(kernel, mode) as done:
        out, lse = kernel(q, k, v)
    assert done == {NAME}
    rules = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v))
    reached = np.zeros(out.shape, bool)
    for head in range(3):
        reached[0, :, head, 5] = rules.allowed(0, head)[:, NON_FINITE_KEYS[where]].any(axis=1)
    assert reached.any()
    assert not np.isfinite(out[reached].astype(np.float32)).any()
    assert agree(out[~reached], clean[~reached])
    assert out[1].tobytes() == clean[1].tobytes()
    assert out[0, :, 3:].tobytes() == clean[0, :, 3:].tobytes()
    assert lse.tobytes() == clean_lse.tobytes()


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
@pytest.mark.parametrize("dims", some(HEAD_DIMS, *HEAD_DIMS[::5]))
def test_with_a_softcap_each_non_finite_column_reaches_only_its_own_outputs(dims: tuple[int, int], mode: Mode) -> None:
    """A softcap changes the tile sizes. Each key has NaN in another column, or in none."""
    dim, dim_v = dims
    spec = forward_spec(dim, dim_v, mask=fg.window(90, 0), score=fg.softcap(30.0))
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(9)
    q, k, v = (random.standard_normal((1, 270, h, d)).astype(dtype) for h, d in ((3, dim), (3, dim), (3, dim_v)))
    clean, clean_lse = kernel(q, k, v)
    keys, bad = np.arange(270), np.zeros((3, 270, dim_v), bool)
    bad[0, keys, keys * 37 % dim_v] = keys % 3 > 0
    bad[1, keys] = random.random((270, dim_v)) < 0.01
    bad[2, 64:200] = True
    v[0][bad.transpose(1, 0, 2)] = random.choice([np.nan, np.inf, -np.inf], bad.sum())
    with launches(kernel, mode):
        out, lse = kernel(q, k, v)
    allowed = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v)).allowed(0, 0)
    reached = np.einsum("qk,hkd->qhd", allowed.astype(np.int32), bad.astype(np.int32)) > 0
    assert not np.isfinite(out[0][reached].astype(np.float32)).any()
    assert agree(out[0][~reached], clean[0][~reached])
    assert lse.tobytes() == clean_lse.tobytes()


#: Masks that are costly to evaluate, with full blocks and without.
COSTLY = {
    "blocks": lambda: fg.causal() & fg.block_sparse(np.tri(8, dtype=bool) ^ (np.arange(8) % 3 == 1), 64),
    "every third": lambda: fg.window(150, 30) & fg.dilated(3),
    "every third or near": lambda: fg.Mask.of(lambda b, h, q, k: (k <= q) & (((q - k) % 3 == 0) | (q - k > 140))),
}


@pytest.mark.parametrize(
    ("dims", "mask"), some(product(HEAD_DIMS, COSTLY), *zip([(64, 64), (128, 128), (256, 256)], COSTLY, strict=True))
)
def test_with_a_costly_mask_non_finite_values_reach_exactly_the_allowed_queries(
    dims: tuple[int, int], mask: str
) -> None:
    """In one head all keys have a NaN, each in a column of its own; in the other head only three have one."""
    dim, dim_v = dims
    spec = forward_spec(dim, dim_v, mask=COSTLY[mask]())
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(10)
    q, k, v = (random.standard_normal((1, 400, h, d)).astype(dtype) for h, d in ((2, dim), (2, dim), (2, dim_v)))
    clean, clean_lse = kernel(q, k, v)
    keys, bad = np.arange(400), np.zeros((2, 400, dim_v), bool)
    bad[0, keys, keys * 37 % dim_v] = True
    bad[1, [7, 170, 399], [3, 20, dim_v - 1]] = True
    v[0][bad.transpose(1, 0, 2)] = np.nan
    with launches(kernel, Mode("random", seed=dim)) as done:
        out, lse = kernel(q, k, v)
    assert done == {NAME}
    allowed = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v)).allowed(0, 0)
    reached = np.einsum("qk,hkd->qhd", allowed.astype(np.int32), bad.astype(np.int32)) > 0
    assert np.isnan(out[0][reached].astype(np.float32)).all()
    assert agree(out[0][~reached], clean[0][~reached])
    assert lse.tobytes() == clean_lse.tobytes()


MANY_STEPS = {"causal": fg.causal(), "window": fg.window(700, 100)}


@pytest.mark.parametrize(("name", "where"), diagonal(list(MANY_STEPS), list(NON_FINITE_KEYS)))
def test_non_finite_values_reach_exactly_the_allowed_queries_of_tiles_with_many_steps(name: str, where: str) -> None:
    spec = forward_spec(256, 256, mask=MANY_STEPS[name])
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(8)
    q, k, v = (random.standard_normal((1, 800, h, 256)).astype(dtype) for h in (2, 1, 1))
    rules = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v))
    clean, clean_lse = kernel(q, k, v)
    keys = [790] if where == "first" else NON_FINITE_KEYS[where]
    v[0, keys, 0, 5] = np.inf
    for mode in (Mode("random", seed=3), Mode(race=True)):
        with launches(kernel, mode) as done:
            out, lse = kernel(q, k, v)
        assert done == {NAME}
        reached = rules.allowed(0, 0)[:, keys].any(axis=1)
        assert not np.isfinite(out[0, reached, :, 5].astype(np.float32)).any()
        found, right = out.copy(), clean.copy()
        found[0, reached, :, 5] = right[0, reached, :, 5] = 0
        assert agree(found, right)
        assert lse.tobytes() == clean_lse.tobytes()


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_rows_without_keys_are_zero_when_a_whole_input_is_nan(name: str, which: str) -> None:
    spec = forward_spec(128, 128, **SPECS[name])
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(7)
    x = {n: random.standard_normal((2, rows, 2, 128)).astype(dtype) for n, rows in (("q", 460), ("k", 400), ("v", 400))}
    x[which][:] = np.nan
    arrays = x["q"], x["k"], x["v"]
    out, lse = kernel(*arrays)
    rules = oracle.Rules(spec, oracle.problem.read_problem(spec, *arrays))
    for b in range(2):
        attends = rules.allowed(b, 0).any(axis=1)
        assert attends.any()
        assert not attends.all()
        assert (out[b, ~attends] == 0).all()
        assert (lse[b, :, ~attends] == -np.inf).all()
        assert np.isnan(out[b, attends].astype(np.float32)).all()


# ---- Gradients


@pytest.mark.parametrize(("name", "dim"), combined(some(DIMS, *DIMS[::2])))
def test_a_non_finite_value_reaches_exactly_the_gradients_that_depend_on_it(name: str, dim: int) -> None:
    spec = fg.AttentionSpec(dim, **SPECS[name])
    assert_reaches_only_dependent_gradients(spec, "v", Mode("random", seed=dim), 200)


WIDTHS_AND_MASKS = [(64, "causal"), (96, "window"), (128, "documents"), (192, "documents"), (256, "causal")]


@pytest.mark.parametrize(("dim", "name"), some(WIDTHS_AND_MASKS, *WIDTHS_AND_MASKS[::4]))
def test_a_non_finite_key_reaches_exactly_the_gradients_that_depend_on_it(dim: int, name: str) -> None:
    assert_reaches_only_dependent_gradients(fg.AttentionSpec(dim, **SPECS[name]), "k", Mode("random", seed=dim), 130)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", ["top-left", "softcap, top-left", "holes"])
def test_nan_in_a_row_that_no_query_attends_to_changes_no_gradient(name: str, which: str) -> None:
    """The masks would allow the row to queries beyond the last one."""
    fields = {"top-left": {"mask": fg.causal("top-left")}, "holes": {"mask": fg.causal("top-left") & fg.document(IDS)}}
    spec = fg.AttentionSpec(64, **fields.get(name, {"mask": fg.causal("top-left"), "score": fg.softcap(3.0)}))
    random = np.random.default_rng(5)
    x = {
        n: random.standard_normal((1, length, 1, 64)).astype(spec.element.numpy())
        for n, length in (("do", 70), ("q", 70), ("k", 120), ("v", 120))
    }
    captured = {n: np.zeros((1, 120), np.int32) for n in spec.tensors} or None
    x[which][:, 100, 0, 3] = np.nan
    kernel = built(spec)
    exact = oracle.backward(spec, x["q"], x["k"], x["v"], x["do"], captured=captured)
    for gradient, expected in zip(backward(kernel, x, captured), exact, strict=True):
        assert np.isfinite(expected).all()
        assert within_rounding(gradient, expected)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("key", [3, 9])
def test_nan_in_a_value_that_no_query_attends_to_leaves_its_key_without_gradient(dim: int, key: int) -> None:
    """Each lane of a warpgroup has two rows of dK, eight apart. A NaN in V reaches the row of its key alone."""
    spec = fg.AttentionSpec(dim, mask=fg.causal("top-left"))
    x = Case("unattended", 1, 63, heads=1, heads_kv=1).inputs(spec)
    x.v[:, key] = np.nan
    kernel = built(spec)
    o, lse = kernel(x.q, x.k, x.v)
    assert all(np.isfinite(g.astype(np.float32)).all() for g in kernel.backward(x.do, x.q, x.k, x.v, o, lse))


@pytest.mark.parametrize(("dim", "ordered"), [(64, False), (128, False), (128, True), (256, False)])
@pytest.mark.parametrize("query", [0, 3, 9])
def test_a_query_that_attends_to_nothing_has_no_gradient_whatever_its_output_s_is(
    dim: int, ordered: bool, query: int
) -> None:
    spec = fg.AttentionSpec(dim, mask=fg.causal(), deterministic=ordered)
    x = Case("attends to nothing", 63, 1, heads=1, heads_kv=1).inputs(spec)
    x.do[:, query] = np.nan
    kernel = built(spec)
    o, lse = kernel(x.q, x.k, x.v)
    assert all(np.isfinite(g.astype(np.float32)).all() for g in kernel.backward(x.do, x.q, x.k, x.v, o, lse))


def test_nan_reaches_gradients_even_where_probabilities_underflow() -> None:
    """Most probabilities are 0 in float32, and 0 times NaN is NaN."""
    spec = fg.AttentionSpec(64, **SPECS["causal"])
    x = Case("vanishing", 100, 100, fill="huge").inputs(spec)
    x.v[:, 95, :, 3] = np.nan
    kernel = built(spec)
    arrays = (x.q, x.k, x.v)
    found = kernel.backward(x.do, *arrays, *kernel(*arrays))
    for gradient, expected in zip(found, oracle.backward(spec, *arrays, x.do), strict=True):
        assert (np.isfinite(gradient.astype(np.float64)) == np.isfinite(expected)).all()


@pytest.mark.parametrize(("dim", "role"), [(128, "main"), (256, "query")])
def test_the_backward_pass_handles_a_non_finite_key_without_a_race(dim: int, role: str) -> None:
    assert_reaches_only_dependent_gradients(fg.AttentionSpec(dim, **SPECS["causal"]), "k", Mode(race=True), 60, role)


def assert_reaches_only_dependent_gradients(
    spec: fg.AttentionSpec, which: str, mode: Mode, length: int, role: str = "main"
) -> None:
    kernel = built(spec)
    dtype, random = spec.element.numpy(), np.random.default_rng(5)
    x = {n: random.standard_normal((1, length, 2, spec.head_dim)).astype(dtype) for n in ("do", "q", "k", "v")}
    captured = {n: ids[:1, :length] for n, ids in spec.tensors.items()} or None
    clean = backward(kernel, x, captured)
    bad = {length // 3: np.nan, length // 2: np.inf}
    for key, value in bad.items():
        x[which][:, key, 0, 3] = value
    with launches(kernel, mode, role) as done:
        found = backward(kernel, x, captured)
    assert done == {NAME}
    allowed = oracle.Rules(spec, oracle.problem.read_problem(spec, x["q"], x["k"], x["v"])).allowed(0, 0)
    queries = allowed[:, list(bad)].any(axis=1)
    keys = allowed[queries].any(axis=0)
    assert queries.any()
    assert not queries.all()
    exact = oracle.backward(spec, x["q"], x["k"], x["v"], x["do"], captured=captured)
    for gradient, before, expected, reached in zip(found, clean, exact, (queries, keys, keys), strict=True):
        # The other head does not depend on it.
        assert within_rounding(gradient[:, :, 1], before[:, :, 1])
        assert within_rounding(gradient[:, ~reached, 0], before[:, ~reached, 0])
        assert (np.isfinite(gradient.astype(np.float64)) == np.isfinite(expected)).all()
    assert not np.isfinite(exact[0]).all()
    assert not np.isfinite(exact[1]).all()


def within_rounding(a: Any, b: Any) -> bool:
    """Tiles with non-finite keys take another path, and dQ is summed in any order."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.abs(a - b).max(initial=0.0) <= 0.02 * np.abs(b).max(initial=1.0))


def backward(kernel: fg.Kernel, x: dict[str, Any], captured: Any) -> Any:
    o, lse = kernel(x["q"], x["k"], x["v"], captured=captured)
    return kernel.backward(x["do"], x["q"], x["k"], x["v"], o, lse, captured=captured)
