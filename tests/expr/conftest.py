"""Random expressions, and values for everything that they capture."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.build import binary, select, unary
from flashgen.expr.tree.captured import load
from flashgen.expr.tree.nodes import Const, Index, Length, Node, Scalar, Score, Tensor

Array = np.ndarray[Any, Any]
LONGEST = 24
ROOTS_AND_ANGLES = ("sqrt", "sin", "cos", "tan")
BATCH, HEADS = 2, 3
INTS = ("w", "n", "m")
SCALARS = {**{name: Scalar(name, "int") for name in INTS}, "x": Scalar("x", "float"), "on": Scalar("on", "bool")}
TENSORS = {
    "ids": Tensor("ids", "int", 2),
    "lengths": Tensor("lengths", "int", 1),
    "steps": Tensor("steps", "int", 1),
    "pattern": Tensor("pattern", "bool", 3),
    "seen": Tensor("seen", "bool", 1),
    "slopes": Tensor("slopes", "float", 1),
    "bias": Tensor("bias", "float", 2),
}
CAPTURED = {**SCALARS, **TENSORS}


class Draw:
    """Draws trees; ``depth`` bounds how far they go down."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def small(self, low: int = -3, high: int = 12) -> Node:
        return Const(int(self.rng.integers(low, high)))

    def fixed(self) -> Node:
        """An int that is the same for all pairs of a head."""
        b = Index("b")
        return self.pick(
            self.small(),
            self.small(),
            SCALARS[self.pick(*INTS)],
            Length("q_len"),
            Length("k_len"),
            b,
            load(TENSORS["lengths"], (b,)),
            Length("k_len") - Length("q_len"),
        )

    def int_(self, depth: int) -> Node:
        q, k = Index("q"), Index("k")
        if depth <= 0 or self.rng.random() < 0.3:
            return self.pick(q, k, q, k, q - k, k - q, self.fixed())
        a = self.int_(depth - 1)
        op = self.pick(
            *("+", "-", "-", "*", "//", "%", "min", "max", "abs", "neg", "where", "ids", "steps"),
            *("&", "|", "^", "<<", ">>", "~"),
        )
        if op in ("&", "|", "^"):
            return binary(op, a, self.pick(self.int_(depth - 1), self.small(), Const(7), SCALARS["m"]))
        if op == "<<":
            return binary("<<", self.pick(binary("%", a, 16), binary("min", a, 9)), self.count())
        if op == ">>":
            return binary(">>", a, self.count())
        if op in ("+", "-", "min", "max"):
            return binary(op, a, self.int_(depth - 1))
        if op == "*":
            return binary(op, a, self.pick(self.small(), SCALARS["w"], self.int_(0)))
        if op in ("//", "%"):
            return binary(op, a, self.pick(self.small(1, 8), self.small(1, 8), SCALARS["n"], self.small(-4, 0)))
        if op == "where":
            return select(self.bool_(depth - 1), a, self.int_(depth - 1))
        if op == "ids":
            return load(TENSORS["ids"], (Index("b"), self.pick(q, k, k, binary("%", a, LONGEST))))
        if op == "steps":
            return load(TENSORS["steps"], (self.pick(q, k, k - q + LONGEST, binary("%", a, LONGEST)),))
        return unary("-" if op == "neg" else op, a)

    def count(self) -> Node:
        """By how much a number is shifted."""
        varying = binary("%", self.pick(Index("q"), Index("k")), 5)
        return self.pick(self.small(0, 5), self.small(0, 5), binary("max", SCALARS["n"], 0), varying)

    def compared(self, depth: int) -> Node:
        a = self.int_(depth)
        return binary(self.pick("<", "<=", ">", ">=", "==", "!="), a, self.pick(self.fixed(), self.int_(depth)))

    def bool_(self, depth: int) -> Node:
        kind = self.rng.integers(12)
        if depth <= 0 or kind < 5:
            return self.compared(min(depth, 2))
        if kind < 10:
            return binary(self.pick("&", "&", "|"), self.bool_(depth - 1), self.bool_(depth - 1))
        if kind == 10:
            return self.pick(self.special(), unary("~", self.bool_(depth - 1)))
        return self.pick(
            select(self.bool_(depth - 1), self.bool_(depth - 1), self.bool_(depth - 1)),
            binary(self.pick("==", "!="), self.bool_(depth - 1), self.bool_(depth - 1)),
        )

    def special(self) -> Node:
        b, h, q, k = (Index(name) for name in "bhqk")
        n = self.pick(self.small(1, 8), SCALARS["n"])
        block = self.small(1, 6)
        return self.pick(
            load(TENSORS["ids"], (b, q)) == load(TENSORS["ids"], (b, k)),
            k < load(TENSORS["lengths"], (b,)),
            (q - k) % n == 0,
            q // n == k // n,
            load(TENSORS["pattern"], (h, q // block, k // block)),
            load(TENSORS["seen"], (self.pick(q, k),)),
            abs(q - k) <= SCALARS["w"],
            SCALARS["on"],
            SCALARS["x"] > 0.5,
            (q + k) * SCALARS["x"] > 3,
        )

    def float_(self, depth: int) -> Node:
        s, h, q, k = Score(), Index("h"), Index("q"), Index("k")
        if depth <= 0 or self.rng.random() < 0.15:
            return self.pick(
                s,
                s,
                SCALARS["x"],
                Const(float(np.float32(self.rng.normal()))),
                load(TENSORS["slopes"], (h,)),
                load(TENSORS["bias"], (h, self.pick(q, k))),
                unary("float", self.pick(q - k, q, k)),
            )
        a = self.float_(depth - 1)
        op = self.pick(
            "+", "-", "*", "/", "min", "max", "abs", "neg", "exp", "log", "tanh", "sigmoid", "where", *ROOTS_AND_ANGLES
        )
        if op == "/":
            return binary("/", a, self.pick(Const(2.5), 1.0 + abs(self.float_(depth - 1)), SCALARS["w"] + 20))
        if op in ("+", "-", "*", "min", "max"):
            return binary(op, a, self.pick(self.float_(depth - 1), self.int_(0)))
        if op == "where":
            return select(self.bool_(1), a, self.float_(depth - 1))
        if op == "exp":
            return unary("exp", binary("min", a, 2.0))
        if op == "log":
            return unary("log", 0.5 + abs(a))
        if op == "sqrt":
            return unary("sqrt", 0.5 + abs(a))
        return unary("-" if op == "neg" else op, a)

    def values(self, len_q: int, len_k: int) -> dict[str, Any]:
        """Values for every captured name, and the lengths."""
        rng = self.rng
        return {
            "q_len": len_q,
            "k_len": len_k,
            "w": int(rng.integers(-2, 12)),
            "n": int(rng.integers(-1, 8)),
            "m": int(rng.integers(-40, 40)),
            "x": float(np.float32(rng.normal())),
            "on": bool(rng.integers(2)),
            "ids": rng.integers(-3, 5, (BATCH, LONGEST)),
            "lengths": rng.integers(0, LONGEST + 1, BATCH),
            "steps": rng.integers(-5, 30, 2 * LONGEST + 1),
            "pattern": rng.random((HEADS, LONGEST, LONGEST)) < 0.4,
            "seen": rng.random(LONGEST) < 0.4,
            "slopes": rng.normal(size=HEADS).astype(np.float32),
            "bias": rng.normal(size=(HEADS, LONGEST)).astype(np.float32),
        }


@pytest.fixture(scope="session")
def draw() -> type[Draw]:
    return Draw


@pytest.fixture(scope="session")
def captured() -> dict[str, Scalar | Tensor]:
    return CAPTURED


@pytest.fixture(scope="session")
def read(captured: dict[str, Scalar | Tensor]) -> Callable[[str], Node]:
    """The expression that a text means."""
    return lambda source: parse(source, captured)


@pytest.fixture(scope="session")
def column() -> Callable[[str, Array, Array], None]:
    """Runs one line of C++ for every element of x."""
    return _column


def _column(body: str, x: Array, out: Array) -> None:
    kinds = {"f4": "float", "i4": "i32"}
    source = (
        '#include "flashgen/expression.cuh"\n#include "flashgen/trigonometry.cuh"\nusing namespace flashgen;\n'
        f"struct Params {{ const {kinds[x.dtype.str[1:]]}* x; {kinds[out.dtype.str[1:]]}* out; }};\n"
        "FLASHGEN_KERNEL(32, 1) column(FLASHGEN_GRID_CONSTANT Params params) { FLASHGEN_SHARED_MEMORY(shared);\n"
        f"for (i32 i = thread_idx(); i < {out.size}; i += 32) {{ {body} }} }}\n"
    )
    buffers = [Buffer("x", x.ctypes.data, x.nbytes), Buffer("out", out.ctypes.data, out.nbytes, True)]
    kernel = EmulatedKernel("column", source)
    kernel.launch(1, struct.pack("QQ", x.ctypes.data, out.ctypes.data), buffers, threads=32)
