"""Every named mask and score, and random expressions: forward and backward agree with the oracle on the emulator.

How many random expressions there are says DRAWN_CASES, as for the drawn cases. Several of them are compiled
together, each chosen by a captured number: a build costs as much as many launches.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.errors import ArgumentError
from flashgen.expr import Index, Node, Scalar, Tensor, cos, exp, maximum, minimum, sigmoid, sin, sqrt, tan, tanh, where
from flashgen.expr import Score as Logit
from flashgen.expr.trace.traced import with_used
from flashgen.expr.tree.build import binary
from flashgen.expr.tree.captured import load
from flashgen.spec import Mask, Score, score
from flashgen.spec.masks import named as masks
from tests.drawn import LEVEL, diagonal, some

pytestmark = pytest.mark.in_turns(12)

BATCH, HEADS, HEADS_KV = 2, 4, 2
RANDOM = np.random.default_rng(0)
IDS = np.sort(RANDOM.integers(0, 4, (BATCH, 150))).astype(np.int32)
MIXED_IDS = RANDOM.integers(0, 3, (BATCH, 150)).astype(np.int64)
SLOPES = np.array([0.5, 0.25, 0.1, 1], np.float32)
WORDS = np.array([0, 1, 0x55, 0x80], np.int32)
ANGLES = np.geomspace(1e-3, 1e30, 150, dtype=np.float32)
LOGITS = np.array([0.5, -2, 4, -np.inf], np.float32)
PATTERN = RANDOM.integers(0, 2, (HEADS, 3, 3)).astype(bool)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def check(
    spec: fg.AttentionSpec,
    len_q: int,
    len_kv: int,
    arch: str = "sm_80",
    seed: int = 0,
    meant: fg.AttentionSpec | None = None,
    **options: Any,
) -> None:
    """Forward and backward of one call against the oracle, which may get the same spec in other words."""
    kernel = fg.build(spec, arch=arch, target="emulator")
    random, dtype = np.random.default_rng(seed), spec.element.numpy()
    q, do = (random.standard_normal((BATCH, len_q, HEADS, spec.head_dim)).astype(dtype) for _ in range(2))
    k, v = (random.standard_normal((BATCH, len_kv, HEADS_KV, spec.head_dim)).astype(dtype) for _ in range(2))
    kernel.target.options = options
    try:
        out, lse = kernel(q, k, v, captured=spec.tensors)
        found = (out, lse, *kernel.backward(do, q, k, v, out, lse, captured=spec.tensors))
    finally:
        kernel.target.options = {}
    meant = meant or spec
    exact = (*oracle.forward(meant, q, k, v), *oracle.backward(meant, q, k, v, do))
    limits = oracle.bounds(meant, q, k, v, do, exact=exact)
    for name, result, reference in zip(("o", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        verdict = oracle.check(result, reference, getattr(limits, name), exact_infinity=name == "lse")
        assert verdict.ok, (spec.describe(), name, verdict)


MASKS: dict[str, Mask] = {
    "documents": masks.document(IDS),
    "causal documents": fg.causal() & masks.document(IDS),
    "mixed documents": masks.document(MIXED_IDS),
    "prefix": masks.prefix_lm(40),
    "prefix per sequence": masks.prefix_lm(np.array([7, 130], np.int32)),
    "dilated": fg.causal() & masks.dilated(7),
    "global": fg.window(20, 0) | masks.global_tokens(5),
    "chunked": fg.causal() & masks.chunked(50),
    "padding": masks.key_padding(np.array([3, 100], np.int32)),
    "nothing for one sequence": masks.key_padding(np.array([0, 150], np.int32)),
    "blocks": masks.block_sparse(PATTERN, 64),
    "narrow blocks": fg.causal() & masks.block_sparse(normal(10, 10) > 0, 16),
    "one head sees nothing": Mask.of(lambda b, h, q, k: (h != 2) & (q >= k)),
    "not": ~masks.chunked(64),
    "bits": Mask.of(lambda b, h, q, k: ((q ^ k) & 5 == 0) | (k >> 4 == q >> 4) | ((1 << (k & 7)) & WORDS[h] != 0)),
}
SCORES: dict[str, Score] = {
    "softcap": score.softcap(3.0),
    "alibi": score.alibi(SLOPES),
    "bias": score.bias(normal(1, HEADS, 150, 150)),
    "bias of keys": score.bias(normal(BATCH, 1, 1, 150, dtype=np.float16)),
    "relative": score.relative_bias(normal(HEADS, 65)),
    "sink": score.sink(LOGITS),
    "waves": Score.of(lambda s, b, h, q, k: s * fg.cos((q - k) * 0.3) + fg.sin(SLOPES[h] * s) * fg.sqrt(abs(q - k))),
    "large angles": Score.of(lambda s, b, h, q, k: s + fg.sin((q * 1000 + k) * 0.37) * fg.cos(s * 50)),
    "angles of a table": Score.of(lambda s, b, h, q, k: s + fg.sin(ANGLES[k]) * fg.cos(ANGLES[q]) * fg.sqrt(h + 1)),
    "everything": score.softcap(3.0) >> score.alibi(SLOPES) >> score.sink(LOGITS),
}


#: What a developer's run tries, DRAWN_CASES=ci trying all: one of each kind, and what is built for other tests anyway.
SAMPLE = (
    "documents",
    "bits",
    "global",
)
FAMILIES = (("sm_75", "fp16", 64), ("sm_80", "fp32", 40), ("sm_90", "bf16", 128), ("sm_120", "fp16", 64))


@pytest.mark.parametrize("name", some(MASKS, *SAMPLE))
def test_a_mask_is_obeyed(name: str) -> None:
    check(fg.AttentionSpec(32, mask=MASKS[name]), 150, 150)


@pytest.mark.parametrize("name", some(MASKS, "narrow blocks"))
def test_a_mask_is_obeyed_without_atomics_and_without_races(name: str) -> None:
    check(fg.AttentionSpec(32, mask=MASKS[name], deterministic=True), 150, 150, race=True)


@pytest.mark.parametrize("name", some(SCORES, "bias", "waves", "everything"))
def test_a_score_is_applied_and_differentiated(name: str) -> None:
    check(fg.AttentionSpec(32, mask=fg.causal(), score=SCORES[name]), 130, 150, schedule="random", seed=1)


@pytest.mark.parametrize("name", some(SCORES, "everything"))
def test_a_score_is_applied_and_differentiated_without_atomics(name: str) -> None:
    check(fg.AttentionSpec(32, mask=MASKS["causal documents"], score=SCORES[name], deterministic=True), 150, 150)


@pytest.mark.parametrize(("arch", "dtype", "dim"), some(FAMILIES, FAMILIES[0]))
def test_every_family_of_kernels_takes_masks_and_scores(arch: str, dtype: str, dim: int) -> None:
    mask, changed = MASKS["causal documents"], SCORES["everything"]
    check(fg.AttentionSpec(dim, dtype=dtype, mask=mask, score=changed), 150, 150, arch)
    check(fg.AttentionSpec(dim, dtype=dtype, mask=MASKS["global"], deterministic=True), 70, 150, arch)


@pytest.mark.parametrize(("arch", "dtype"), some([("sm_80", "fp32"), ("sm_90a", "bf16")], ("sm_90a", "bf16")))
def test_large_angles_are_as_exact_as_floats_hold_them(arch: str, dtype: str) -> None:
    dim = 64 if arch == "sm_90a" else 32
    check(fg.AttentionSpec(dim, dtype=dtype, mask=MASKS["bits"], score=SCORES["large angles"]), 130, 150, arch)


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"], "fp32"))
def test_angles_of_any_size_are_reduced(dtype: str) -> None:
    spec = fg.AttentionSpec(32, dtype=dtype, score=SCORES["angles of a table"])
    q, k, v = (normal(BATCH, 150, n, 32).astype(spec.element.numpy()) for n in (HEADS, HEADS_KV, HEADS_KV))
    limits = oracle.bounds(spec, q, k, v)
    assert limits.o < {"fp32": 1e-4, "bf16": 0.1}[dtype], "angles that are exact do not make the bound wide"
    check(spec, 150, 150)


def test_warps_that_split_the_keys_take_masks_and_scores() -> None:
    schedule = fg.Schedule(warps=fg.WarpPartition("split_k", 4))
    spec = fg.AttentionSpec(32, mask=MASKS["documents"], score=SCORES["everything"], direction="forward")
    kernel = fg.build(spec, schedule, target="emulator")
    q, k, v = (normal(BATCH, 150, n, 32).astype(spec.element.numpy()) for n in (HEADS, HEADS_KV, HEADS_KV))
    out, lse = kernel(q, k, v)
    exact = oracle.forward(spec, q, k, v)
    limits = oracle.bounds(spec, q, k, v, exact=exact)
    assert oracle.check(out, exact[0], limits.o).ok
    assert oracle.check(lse, exact[1], limits.lse, exact_infinity=True).ok


@pytest.mark.parametrize(
    ("name", "deterministic"), diagonal(["causal documents", "chunked", "padding", "global"], [False, True])
)
def test_a_non_finite_key_reaches_only_the_queries_that_attend_to_it(name: str, deterministic: bool) -> None:
    mask = masks.key_padding(np.array([70, 78], np.int32)) if name == "padding" else MASKS[name]
    spec = fg.AttentionSpec(32, mask=mask, deterministic=deterministic)
    kernel = fg.build(spec, target="emulator")
    q, k, v, do = (normal(BATCH, 150, n, 32).astype(spec.element.numpy()) for n in (HEADS, HEADS_KV, HEADS_KV, HEADS))
    k[:, 77, :, 3], v[:, 77, :, 5] = np.nan, np.inf
    out, lse = kernel(q, k, v)
    dq, _, _ = kernel.backward(do, q, k, v, out, lse)
    anywhere = False
    rules = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v))
    for b, h in np.ndindex(BATCH, HEADS):
        hidden = ~rules.allowed(b, h)[:, 77]
        anywhere |= bool(hidden.any())
        assert np.isfinite(out[b, hidden, h].astype(np.float32)).all()
        assert np.isfinite(dq[b, hidden, h].astype(np.float32)).all()
        assert not np.isfinite(out[b, ~hidden, h].astype(np.float32)).all(axis=-1).any()
    assert anywhere


def test_huge_logits_are_exact_under_a_mask_and_a_score() -> None:
    spec = fg.AttentionSpec(16, dtype="fp32", mask=MASKS["causal documents"], score=SCORES["alibi"])
    kernel = fg.build(spec, target="emulator")
    q, k, v = (np.round(normal(BATCH, 150, n, 16)).astype(np.float32) for n in (HEADS, HEADS_KV, HEADS_KV))
    q[..., 0], k[..., 0] = 1000.0, 1000.0
    out, lse = kernel(q, k, v, scale=1.0)
    exact = oracle.forward(spec, q, k, v, scale=1.0)
    np.testing.assert_allclose(lse, exact[1], rtol=1e-5)
    assert np.isfinite(out).all()


# ---- Captured values are arguments


def test_captured_tensors_can_be_given_with_the_call() -> None:
    spec = fg.AttentionSpec(16, mask=masks.document(IDS))
    other = np.sort(RANDOM.integers(0, 9, (BATCH, 150))).astype(np.int32)
    check(fg.AttentionSpec(16, mask=masks.document(other)), 150, 150)
    kernel = fg.build(spec, target="emulator")
    q, k, v = (normal(BATCH, 150, n, 16).astype(spec.element.numpy()) for n in (HEADS, HEADS_KV, HEADS_KV))
    expected, _ = oracle.forward(spec, q, k, v, captured={"ids": other})
    out, _ = kernel(q, k, v, captured={"ids": other})
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-2)


@pytest.mark.parametrize(
    ("captured", "message"),
    [
        ({"id": IDS}, r"captured=\{'id': ...\} is not a captured tensor; this kernel has ids"),
        ({"ids": [1, 2]}, r"captured\['ids'\] is a list; pass a tensor of int32"),
        ({"ids": MIXED_IDS}, r"captured\['ids'\] has 2 dimensions of int64; the kernel was built for 2 of int32"),
        ({"ids": IDS[0]}, r"captured\['ids'\] has 1 dimensions of int32"),
        ({"ids": IDS[:, :20]}, r"captured\['ids'\] has 20 elements in dimension 1, which is indexed with q"),
        ({"ids": IDS[:1]}, r"captured\['ids'\] has 1 elements in dimension 0, which is indexed with b"),
        ({"ids": IDS[:, :0]}, r"captured\['ids'\] is empty"),
    ],
)
def test_captured_tensors_that_do_not_fit_are_refused(captured: dict[str, Any], message: str) -> None:
    kernel = fg.build(fg.AttentionSpec(16, mask=masks.document(IDS)), target="emulator")
    q, k, v = (normal(BATCH, 150, n, 16).astype(kernel.spec.element.numpy()) for n in (HEADS, HEADS_KV, HEADS_KV))
    with pytest.raises(ArgumentError, match=message):
        kernel(q, k, v, captured=captured)


def test_captured_values_are_refused_where_nothing_was_captured() -> None:
    kernel = fg.build(fg.AttentionSpec(16), target="emulator")
    q = normal(1, 8, 1, 16).astype(kernel.spec.element.numpy())
    with pytest.raises(ArgumentError, match="the spec's mask and score capture no tensors"):
        kernel(q, q, q, captured={"ids": IDS})


def test_a_tensor_that_no_pair_needs_any_more_is_no_argument() -> None:
    spec = fg.AttentionSpec(16, dtype="fp16", mask=fg.full() | fg.document(IDS), direction="forward")
    assert not spec.tensors
    q = np.ones((1, 5, 1, 16), np.float16)
    out, _ = fg.build(spec, target="emulator")(q, q, q)
    np.testing.assert_array_equal(out, q)


def test_captured_tensors_may_have_any_strides() -> None:
    wide = np.zeros((150, BATCH, 3), np.int32)
    wide[:, :, 1] = IDS.T
    check(fg.AttentionSpec(16, mask=masks.document(wide[:, :, 1].T)), 150, 150)
    check(fg.AttentionSpec(16, mask=masks.document(np.broadcast_to(IDS[:1], (BATCH, 150)))), 150, 150)


# ---- Random expressions

TOGETHER = 8
COUNTS = {"sample": 1, "ci": 64, "nightly": 640}
B, H, Q, K = (Index(name) for name in "bhqk")
S = Logit()
NUMBERS = {"three": 3, "seventeen": 17, "sixty_four": 64}
PICK = Scalar("pick", "int")
PER_HEAD = load(Tensor("slopes", "float", 1), (H,))


def whole_number(random: Random, depth: int) -> Node:
    """A random whole number of the indices and captured numbers."""
    if depth == 0:
        leaves = [Q, K, Q, K, Q - K, K - Q, H, B, *(Scalar(name, "int") for name in NUMBERS)]
        return random.choice(leaves)
    x = whole_number(random, depth - 1)
    op = random.choice(["+", "-", "*", "//", "%", "min", "max", "abs", "&", "|", "^", "<<", ">>"])
    if op in ("<<", ">>"):
        # By a number that is written in the code, or one that differs from pair to pair.
        count = random.choice([random.randint(0, 4), K % random.randint(2, 5)])
        return binary(op, x if op == ">>" else x % 64, count)
    if op == "*":
        return x * random.randint(-3, 3)
    if op == "//":
        return x // random.randint(1, 40)
    if op == "%":
        return x % random.randint(2, 40)
    if op == "abs":
        return abs(x)
    y = whole_number(random, depth - 1)
    if op in ("min", "max"):
        return minimum(x, y) if op == "min" else maximum(x, y)
    if op in ("&", "|", "^"):
        return binary(op, x, y if random.random() < 0.5 else random.choice([1, 7, 12, -8]))
    return x + y if op == "+" else x - y


def comparison(random: Random) -> Node:
    x, y = whole_number(random, random.randint(0, 2)), whole_number(random, random.randint(0, 1))
    return binary(random.choice(["<", "<=", ">", ">=", ">=", "==", "!="]), x, y)


def condition(random: Random) -> Node:
    """A random condition of a few comparisons."""
    found = comparison(random)
    for _ in range(random.randint(0, 2)):
        found = binary(random.choice("&|"), found, comparison(random))
    return ~found if random.random() < 0.2 else found


def number(random: Random) -> Node:
    """A random score of a few operations, with a slope that is not huge."""
    distance = (Q - K) * random.choice([0.01, -0.02, 0.003])
    terms = [
        tanh(S / random.uniform(1, 8)) * random.uniform(1, 8),
        S + distance,
        S * random.uniform(0.2, 1.5) - PER_HEAD * abs(distance),
        where(random.randint(-20, 60) < Q - K, S, S * 0.5 - 1.0),
        S * sigmoid(distance),
        S + exp(minimum(distance, 1.0)) * 0.3,
        maximum(S, S * 0.25),
        S + (K % random.randint(2, 9)) * 0.1,
        S - (Q // random.randint(1, 50)) * 0.05 + H * 0.2,
        abs(S) * 0.3 + S,
        S + sin(distance * 9) * 0.7,
        S * cos(distance) + tan(distance * 0.2),
        S + cos(S * random.uniform(0.2, 3)) * sqrt(abs(Q - K)) * 0.1,
    ]
    one, other = random.sample(terms, 2)
    return one if random.random() < 0.5 else one * 0.5 + other * 0.5


def drawn(build: int) -> tuple[list[Node], list[Node]]:
    """Eight masks and eight scores."""
    numbers = range(TOGETHER)
    masks = [condition(Random(f"mask {build} {i}")) for i in numbers]
    return masks, [number(Random(f"score {build} {i}")) for i in numbers]


def several(masks: list[Node], scores: list[Node]) -> tuple[Node, Node]:
    """All of them in one expression each; ``pick``, a captured number, says which count."""
    masks = [(i == PICK) & mask for i, mask in enumerate(masks)]
    while len(masks) > 1:
        masks = [a | b for a, b in zip(masks[::2], masks[1::2], strict=True)]
    changed: Node = S
    for i, one in enumerate(scores):
        changed = where(i == PICK, one, changed)
    return masks[0], changed


def spec_of(mask: Node, changed: Node, pick: int, deterministic: bool) -> fg.AttentionSpec:
    scalars = {"pick": pick, **NUMBERS}
    changes = Score(with_used(changed, scalars, {"slopes": SLOPES}))
    return fg.AttentionSpec(
        16, mask=Mask(rest=with_used(mask, scalars, {})), score=changes, deterministic=deterministic
    )


@pytest.mark.parametrize("build", range(COUNTS[LEVEL]))
def test_random_expressions_agree_with_the_oracle(build: int) -> None:
    masks, scores = drawn(build)
    together, is_ordered = several(masks, scores), build % 2 == 1
    for pick in range(TOGETHER):
        spec = spec_of(*together, pick, is_ordered)
        # The oracle is given the one of eight that counts, and has that much less to do.
        meant = spec_of(masks[pick], scores[pick], pick, is_ordered)
        check(spec, 70 + 13 * (pick % 3), 90, seed=pick, meant=meant)
