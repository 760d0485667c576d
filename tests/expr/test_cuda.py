"""Printed C++: expressions of random points are what NumPy makes of them, and read well."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flashgen.compile import nvrtc, options_for
from flashgen.emulator.kernel import Buffer, EmulatedKernel
from flashgen.expr.readings.cuda import CudaText, print_cuda, range_name, search_name
from flashgen.expr.readings.derivative import captured_gradients
from flashgen.expr.readings.numpy import evaluate_all
from flashgen.expr.readings.tiles import tile_rule
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.build import binary, unary
from flashgen.expr.tree.nodes import Binary, Index, Load, Node, Scalar, Select, Tensor, Unary
from flashgen.expr.tree.text import text
from flashgen.expr.tree.tile_nodes import Range, Search, TileVar, Wide
from flashgen.expr.tree.visit import postorder
from flashgen.render.amalgamation.amalgamate import amalgamate
from flashgen.render.source import Origin

Array = np.ndarray[Any, Any]
POINTS = 96
LEAVES = ("b", "h", "q", "k", "s", "q_lo", "q_hi", "k_lo", "k_hi")
#: How each captured tensor is stored: together they cover the conversions.
STORED = {
    "ids": ("i64", np.int64),
    "lengths": ("i32", np.int32),
    "steps": ("short", np.int16),
    "pattern": ("u8", np.uint8),
    "seen": ("u8", np.uint8),
    "slopes": ("float", np.float32),
    "bias": ("half_t", np.float16),
}
KERNEL = """#include "flashgen/expression.cuh"
#include "flashgen/trigonometry.cuh"
using namespace flashgen;
struct Params {{
{fields}
}};
FLASHGEN_KERNEL(32, 1) expressions(FLASHGEN_GRID_CONSTANT Params params) {{
  FLASHGEN_SHARED_MEMORY(shared);
  for (i32 point = thread_idx(); point < {points}; point += 32) {{
{body}
  }}
}}
"""


def captured_struct(array: Array) -> bytes:
    """A ``Captured<T, rank>``: address, strides in elements, sizes."""
    strides = [step // array.itemsize for step in array.strides]
    return struct.pack(f"Q{array.ndim}q{array.ndim}i0q", array.ctypes.data, *strides, *array.shape)


class Kernel:
    """Expressions of random points, as one kernel."""

    def __init__(self, roots: Sequence[Node], captured: dict[str, Any], env: dict[str, Any], points: dict[str, Array]):
        self.roots = roots
        named = {f"root{i}": root for i, root in enumerate(roots)}
        self._tensors = {n: np.asfortranarray(env[n].astype(STORED[n][1])) for n in STORED}
        self._points = {n: points[n].astype(np.float32 if n == "s" else np.int32) for n in points}
        self._results = np.zeros((len(roots), POINTS), np.float32)
        self._whole = np.zeros((len(roots), POINTS), np.int32)
        scalars = {n: s for n, s in captured.items() if isinstance(s, Scalar)}
        fields = [f"Captured<{STORED[n][0]}, {captured[n].rank}> {n};" for n in self._tensors]
        fields += [f"const {'float' if n == 's' else 'i32'}* {n};" for n in self._points]
        fields += ["float* results;", "i32* whole;", "i32 q_len, k_len;"]
        fields += [f"{'float' if s.type == 'float' else 'i32'} {n};" for n, s in scalars.items()]
        names = {n: f"params.{n}" for n in (*self._tensors, *scalars, "q_len", "k_len")}
        names.update({n: f"(params.{n} != 0)" for n, s in scalars.items() if s.type == "bool"})
        lines = [f"const {'float' if n == 's' else 'i32'} {n} = params.{n}[point];" for n in self._points]
        self.printed = print_cuda(named, names)
        lines += [str(statement) for statement in self.printed.statements]
        for i, (root, expression) in enumerate(zip(roots, self.printed.expressions.values(), strict=True)):
            target = "results" if root.type == "float" else "whole"
            lines.append(f"params.{target}[{i * POINTS} + point] = {expression};")
        self.source = KERNEL.format(
            fields="\n".join("  " + f for f in fields), points=POINTS, body="\n".join("    " + x for x in lines)
        )
        arrays = [*self._tensors.values(), *self._points.values(), self._results, self._whole]
        self._params = b"".join(captured_struct(a) for a in self._tensors.values())
        self._params += b"".join(struct.pack("Q", a.ctypes.data) for a in arrays[len(self._tensors) :])
        self._params += struct.pack("ii", env["q_len"], env["k_len"])
        self._params += b"".join(struct.pack("f" if s.type == "float" else "i", env[n]) for n, s in scalars.items())
        self._params += bytes(-len(self._params) % 8)
        writable = (self._results, self._whole)
        self._buffers = [
            Buffer(f"array{i}", a.ctypes.data, a.nbytes, any(a is w for w in writable)) for i, a in enumerate(arrays)
        ]

    def run(self) -> list[Array]:
        EmulatedKernel("expressions", self.source).launch(1, self._params, self._buffers, threads=32)
        return [
            self._results[i] if root.type == "float" else self._whole[i].astype(np.int64)
            for i, root in enumerate(self.roots)
        ]


def compiles(source: str) -> None:
    lines = [(line, Origin("kernels/test.cu", n)) for n, line in enumerate(source.splitlines(), start=1)]
    complete = "\n".join(line for line, _ in amalgamate(lines))
    result = nvrtc.run(complete, "expressions.cu", options_for("sm_80"))
    assert result.succeeded, result.log


def error_bounds(root: Node, values: dict[Node, Array]) -> Array:
    """How far 32-bit arithmetic may be off, operation by operation, each function being right to 4 ulp."""
    unit = 2.0**-24
    errors: dict[Node, Array] = {}
    for node in postorder(root):
        value, below = abs(values[node]), [errors.get(c, np.float64(0)) for c in node.children]
        if node.type != "float":
            continue
        if isinstance(node, Binary):
            a, b = (abs(values[c]) for c in node.children)
            rounding = {"+": sum(below), "-": sum(below), "*": a * below[1] + b * below[0] + unit * value}
            rounding["/"] = (below[0] + value * below[1]) / b + 2 * unit * value if node.op == "/" else 0
            errors[node] = rounding.get(node.op, np.maximum(*below)) + unit * value
        elif isinstance(node, Unary):
            slopes = {"exp": value, "tan": 1 + value * value, "sqrt": 0.5 / np.maximum(value, 2.0**-100)}
            if node.op == "log":
                slopes["log"] = 1 / abs(values[node.operand])
            slope = slopes.get(node.op, 1.0)
            function = 0 if node.op in ("-", "abs") else 8
            errors[node] = slope * below[0] + function * unit * np.maximum(value, 2.0**-100)
        elif isinstance(node, Select):
            errors[node] = np.where(values[node.condition], below[1], below[2])
        else:
            errors[node] = unit * value * (not isinstance(node, Load))
    return np.asarray(errors[root])


def assert_close(root: Node, found: Array, values: dict[Node, Array]) -> None:
    expected = np.broadcast_to(values[root], POINTS)
    if root.type != "float":
        np.testing.assert_array_equal(found, expected, text(root))
        return
    bound = 4 * error_bounds(root, values) + 2.0**-120
    wrong = ~(abs(found - expected) <= bound) & np.isfinite(expected)
    assert not wrong.any(), f"{text(root)}: {found[wrong][:3]} for {expected[wrong][:3]}"


def random_points(rng: np.random.Generator, len_q: int, len_k: int) -> dict[str, Array]:
    points = {n: rng.integers(0, size, POINTS) for n, size in zip("bhqk", (2, 3, len_q, len_k), strict=True)}
    points["s"] = rng.normal(scale=3, size=POINTS).astype(np.float32)
    for axis, length in (("q", len_q), ("k", len_k)):
        a, b = rng.integers(0, length, (2, POINTS))
        points[f"{axis}_lo"], points[f"{axis}_hi"] = np.minimum(a, b), np.maximum(a, b)
    return points


def check(roots: Sequence[Node], random: Any, captured: dict[str, Any]) -> Kernel:
    env = random.values(20, 23)
    env["bias"] = env["bias"].astype(np.float16)
    points = random_points(random.rng, 20, 23)
    kernel = Kernel(roots, captured, env, points)
    found = kernel.run()
    everything = postorder(*roots)
    values = dict(zip(everything, evaluate_all(everything, {**env, **points}), strict=True))
    for root, result in zip(roots, found, strict=True):
        assert_close(root, result, values)
    return kernel


@pytest.mark.parametrize("seed", range(4))
def test_random_masks_and_scores_agree_with_numpy(draw: Any, captured: dict[str, Any], seed: int) -> None:
    random = draw(seed)
    roots = [random.bool_(3) if i % 3 == 0 else random.float_(4) if i % 3 == 1 else random.int_(4) for i in range(75)]
    kernel = check(roots, random, captured)
    if seed == 0:
        compiles(kernel.source)


@pytest.mark.parametrize("seed", range(2))
def test_gradients_of_random_scores_agree_with_numpy(draw: Any, captured: dict[str, Any], seed: int) -> None:
    random = draw(100 + seed)
    scores = [random.float_(3) for _ in range(40)]
    roots = [tree for score in scores for _, tree in captured_gradients(score)]
    assert len(roots) > 20
    check(roots, random, captured)


@pytest.mark.parametrize("seed", range(3))
def test_tile_rules_agree_with_numpy(draw: Any, captured: dict[str, Any], seed: int) -> None:
    random = draw(200 + seed)
    rules = [tile_rule(random.bool_(2)) for _ in range(10)]
    roots = [root for r in rules for root in (r.may, r.full, r.key_begin, r.key_end, r.query_begin, r.query_end)]
    kernel = check(roots, random, captured)
    if seed == 0:
        compiles(kernel.source)


def printed(source: str, captured: dict[str, Any], **names: str) -> CudaText:
    return print_cuda({"root": parse(source, captured, score=True)}, names)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("(q >= k) & (q - k < w)", "(q >= k) & (q - k < params.w)"),
        ("(q < k) == on", "(q < k) == on"),
        ("~(on | seen[k])", "!(on | (load(seen, k) != 0))"),
        ("q // 64 == k % n", "floor_div<64>(q) == floor_mod(k, n)"),
        ("s / 4 - (1 - s)", "s * 0x1p-2f - (0x1p+0f - s)"),
        ("s / x", "s * reciprocal(x)"),
        ("x / s", "x / s"),
        ("s + q", "s + static_cast<float>(q)"),
        ("where(q < k, s, -inf)", "select(q < k, s, -kInfinity)"),
        ("where(q < k, on, q == 3)", "select<bool>(q < k, on, q == 3)"),
        ("q - (k - 3) > -2147483648", "q - (k - 3) > (-2147483647 - 1)"),
        ("minimum(tanh(s), bias[h, q - k])", "smaller(hyperbolic_tangent(s), load(bias, h, q - k))"),
        ("s > 1e300", "s > kInfinity"),
    ],
)
def test_expressions_read_well(captured: dict[str, Any], source: str, expected: str) -> None:
    found = printed(source, captured, w="params.w")
    assert not found.statements
    assert found.expressions["root"] == expected


def test_shared_parts_become_statements_in_order(captured: dict[str, Any]) -> None:
    found = printed("(q - k) * (q - k) + abs((q - k) * (q - k))", captured, t1="taken", q="t2")
    assert [str(s) for s in found.statements] == ["const i32 t1 = t2 - k;", "const i32 t3 = t1 * t1;"]
    assert found.expressions["root"] == "t3 + magnitude(t3)"


def test_a_table_answers_ranges_over_whole_tiles(captured: dict[str, Any]) -> None:
    b, bounds = Index("b"), (TileVar("q_lo"), TileVar("q_hi"))
    node = Range("min", captured["ids"], (b, bounds[0]), (b, bounds[1]), "q")
    assert range_name(node) == "range ids q"
    assert print_cuda({"x": node}).expressions["x"] == "smallest_in(ids, {b, q_lo}, {b, q_hi})"
    found = print_cuda({"x": node}, {"range ids q": "tile_extremes", "b": "batch"})
    assert found.expressions["x"] == "tile_extremes(q_lo, q_hi, batch).smallest()"


def test_a_table_answers_searches(captured: dict[str, Any]) -> None:
    node = Search("last", captured["ids"], 1, (Index("b"),), captured["w"])
    assert search_name(node) == "last ids 1"
    assert print_cuda({"x": node}).expressions["x"] == "last_at_most<1>(ids, w, b)"
    assert print_cuda({"x": node}, {"last ids 1": "table.last"}).expressions["x"] == "table.last(w, b)"


def test_wide_sums_are_clamped(captured: dict[str, Any]) -> None:
    node = Wide("+", (1, -3), (captured["w"], captured["n"]))
    assert print_cuda({"x": node}).expressions["x"] == "clamped(static_cast<i64>(w) - 3 * static_cast<i64>(n))"
    product = Wide("*", (1, 1), (captured["w"], binary("+", captured["n"], 1)))
    assert print_cuda({"x": product}).expressions["x"] == "clamped(static_cast<i64>(w) * (n + 1))"


def test_rank_zero_and_bool_tensors_compile(captured: dict[str, Any]) -> None:
    rank_zero = Load(Tensor("t", "float", 0), ())
    assert print_cuda({"x": unary("-", rank_zero)}).expressions["x"] == "-load(t)"
    source = (
        '#include "flashgen/expression.cuh"\nusing namespace flashgen;\n'
        "struct Params { Captured<float, 0> t; Captured<u8, 1> seen; Captured<bfloat16_t, 1> c; "
        "Captured<double, 1> d; Captured<signed char, 1> e; float* out; };\n"
        "FLASHGEN_KERNEL(32, 1) x(FLASHGEN_GRID_CONSTANT Params params) {\n"
        " params.out[0] = load(params.t) + select(load(params.seen, 1) != 0, load(params.c, 0), load(params.d, 2)) +"
        " load(params.e, 3); }\n"
    )
    compiles(source)
