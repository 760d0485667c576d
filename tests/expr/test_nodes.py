from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from flashgen.errors import TraceError
from flashgen.expr.tree import nodes
from flashgen.expr.tree.functions import abs as fg_abs
from flashgen.expr.tree.functions import exp, k_len, maximum, minimum, q_len, where
from flashgen.expr.tree.nodes import USES, Const, Index, Node, Scalar, Score
from flashgen.expr.tree.text import text

b, h, q, k, s = Index("b"), Index("h"), Index("q"), Index("k"), Score()
w, x, on = Scalar("w", "int"), Scalar("x", "float"), Scalar("on", "bool")


def test_equal_trees_are_one_object() -> None:
    assert (q >= k) & (q - k < 5) is (q >= k) & (q - k < 5)
    assert q + k is not k + q
    assert Const(1) is not Const(1.0)
    assert Const(1) is not Const(True)
    assert Const(0.0) is not Const(-0.0)
    assert Scalar("w", "int") is not Scalar("w", "float")


def test_trees_survive_copies_and_pickles_as_the_same_object() -> None:
    root = where(q < k, exp(s * 2.5), x + w)
    assert pickle.loads(pickle.dumps(root)) is root
    assert copy.deepcopy(root) is root
    assert copy.copy(root) is root


def test_trees_never_change() -> None:
    with pytest.raises(AttributeError, match="nodes never change"):
        q.name = "k"
    with pytest.raises(AttributeError, match="nodes never change"):
        del q.name


def test_trees_work_in_specs_that_are_compared_and_hashed() -> None:
    @dataclass(frozen=True)
    class Spec:
        mask: Node | None

    assert Spec(q >= k) == Spec(q >= k)
    assert Spec(q >= k) != Spec(q > k)
    assert Spec(q == k) != Spec(q != k)
    assert Spec(q >= k) != Spec(None)
    assert {Spec(q >= k): 1}[Spec(q >= k)] == 1
    assert (s == s) is not Const(True)  # a NaN differs from itself
    assert s == s


def test_nodes_that_nobody_holds_are_forgotten() -> None:
    gc.collect()
    before = len(nodes.nodes)
    root: Node | None = q
    for i in range(100):
        root = root * 3 + i
    assert len(nodes.nodes) > before + 100
    del root
    gc.collect()
    assert len(nodes.nodes) <= before + 1


def test_threads_agree_on_which_node_it_is() -> None:
    def build(_: int) -> list[int]:
        return [id(q * 1000 + i) for i in kept]

    kept = range(200)
    held = [q * 1000 + i for i in kept]
    with ThreadPoolExecutor(8) as pool:
        assert {tuple(ids) for ids in pool.map(build, range(32))} == {tuple(id(node) for node in held)}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (q + 0, "q"),
        (0 + q, "q"),
        (q - 0, "q"),
        (0 - q, "-q"),
        (q * 1, "q"),
        (q * 0, "0"),
        (q * -1, "-q"),
        (s * 0, "s * 0.0"),
        (s * 1, "s"),
        (s / 1, "s"),
        (q // 1, "q"),
        (q % 1, "0"),
        (q - q, "0"),
        (s - s, "s - s"),
        (q + 2 - 5, "q - 3"),
        (q - -2, "q + 2"),
        (0 - (0 - q), "q"),
        (abs(-q), "abs(q)"),
        (+q, "q"),
        (q**3, "q * q * q"),
        (~(q < k), "q >= k"),
        (~(s < x), "~(s < x)"),
        (~(s == x), "s != x"),
        (~(~on), "on"),
        (on & True, "on"),
        (on & False, "False"),
        (on | True, "True"),
        (False | on, "on"),
        (on & on, "on"),
        (on ^ (q < k), "on != (q < k)"),
        (on == True, "on"),  # noqa: E712
        (on == False, "~on"),  # noqa: E712
        (q == q, "True"),
        (q < q, "False"),
        (minimum(q, q), "q"),
        (minimum(3, 5) + q, "3 + q"),
        (maximum(2.5, q), "maximum(2.5, q)"),
        (fg_abs(-3) * q, "3 * q"),
        (where(on, 1, 2.0), "where(on, 1.0, 2.0)"),
        (where(True, q, k), "q"),
        (where(on, q, q), "q"),
        (where(on, True, False), "on"),
        (where(on, False, True), "~on"),
        (where(on, q < k, True), "where(on, q < k, True)"),
        ((q < k) * 3, "where(q < k, 1, 0) * 3"),
        (q / 2, "q / 2.0"),
        (Const(7) // -2 + q, "-4 + q"),
        (Const(7) % -2 + q, "-1 + q"),
        (q > 5, "q > 5"),
        (np.int64(5) < q, "5 < q"),
        (np.float32(0.5) * s, "0.5 * s"),
        (np.bool_(True) & on, "on"),
        (q_len - k_len, "q_len - k_len"),
    ],
)
def test_trees_come_in_one_form(node: Node, expected: str) -> None:
    assert text(node) == expected


def test_types_and_dependence_are_known() -> None:
    assert [n.type for n in (q < k, q + k, s + q, q / k, where(on, q, k), abs(s))] == [
        "bool",
        "int",
        "float",
        "float",
        "int",
        "float",
    ]
    assert (q + h).uses == USES["q"] | USES["h"]
    assert (w + q_len).uses == 0
    assert (q + k * 2).depth == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (q < k) & k, "two conditions or two whole numbers, and one side is a whole number"),
        (lambda: ~s, "negates conditions and whole numbers, and this is a float"),
        (lambda: s // 2, "takes whole numbers"),
        (lambda: q % 2.0, "takes whole numbers"),
        (lambda: q // 0, "division by zero"),
        (lambda: s / 0, "division by zero"),
        (lambda: Const(2**31 - 1) + 1, "does not fit the 32-bit integers of the language"),
        (lambda: q + 2**40, "does not fit the 32-bit integers"),
        (lambda: q**1.5, "exponents from 1 to 8"),
        (lambda: q + 10**400, "<an integer of 1329 bits> does not fit the 32-bit integers"),
        (lambda: s + 10**400, "<an integer of 1329 bits> does not fit the 32-bit integers"),
        (lambda: s + Fraction(10**400), "does not fit a float"),
        (lambda: q << s, "shifts whole numbers by whole numbers, and one of them is a float"),
        (lambda: q << -1, "`<< -1` has a negative count; shift the other way by 1"),
        (lambda: q >> -2, "`>> -2` has a negative count"),
        (lambda: q << 31, "`<< 31` leaves the 32 bits of whole numbers"),
        (lambda: Const(1) << 31, "`<< 31` leaves the 32 bits"),
        (lambda: Const(3) << 30, "does not fit the 32-bit integers"),
        (lambda: 2**q, r"write fg.exp\(y \* fg.log\(x\)\)"),
        (lambda: where(q, 1, 2), "wants a condition first"),
        (lambda: s * float("nan"), "nan is not a constant"),
        (lambda: q + "one", "'one' .str. has no meaning here"),
        (lambda: q[0], "a traced value is one number"),
        (lambda: list(q), "cannot be looped over"),
        (lambda: bool(q < k), "is not true or false yet"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        make()
