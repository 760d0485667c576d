from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import TraceError
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.nodes import Const, Index, Load, Node, Scalar, Score, Tensor
from flashgen.expr.tree.text import text


def assert_same(root: Node, captured: Any) -> None:
    source = text(root)
    assert parse(source, captured, score=True) is root, source


@given(seed=st.integers(0, 2**32), depth=st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_text_is_read_back_to_the_same_tree(draw: Any, captured: Any, seed: int, depth: int) -> None:
    random = draw(seed)
    for root in (random.bool_(depth), random.int_(depth), random.float_(depth)):
        assert_same(root, captured)


@pytest.mark.parametrize(
    "source",
    [
        "(q >= k) & (q - k < w)",
        "~on | (q < k) & (q > 3)",
        "(on | (q < k)) & ~seen[q]",
        "q - (k - w)",
        "-(q + k) * -3 // (k % 7)",
        "tanh(s / 30.0) * 30.0 + slopes[h] * (k - q)",
        "where(k < lengths[b], s, -inf)",
        "minimum(abs(q - k), maximum(k_len, q_len) - 1)",
        "(q < k) == (k < w)",
        "float(q) + float(k)",
        "q / 3.0",
        "q / k",
        "float(q - k)",
        "exp(q) + log(1.0 + abs(x))",
        "2147483647 - q > -2147483648",
        "1e-07 * s + 1e+30",
        "-s * -1.5",
        "where(q < k, 1, 0)",
        "((q & k) ^ w) | 5",
        "q & (k ^ (w | 5))",
        "(q & k) == (q | 1)",
        "(q >> (w % 5)) << maximum(n, 0)",
        "q + (1 << (k % 4))",
        "((q ^ k) * 3) & w",
        "(q + 1) & -w",
        "sin(s) * cos(s * x) - tan(q / 7.0)",
        "sqrt(abs(q - k))",
    ],
)
def test_text_in_its_own_style_comes_back_as_it_was(captured: Any, source: str) -> None:
    root = parse(source, captured, score=True)
    assert text(root) == source
    assert_same(root, captured)


def test_a_tensor_without_dimensions_is_its_name() -> None:
    tensor = Tensor("temperature", "float", 0)
    root = Score() * Load(tensor, ())
    assert text(root) == "s * temperature"
    assert_same(root, {"temperature": tensor})


def test_a_tree_that_shares_much_has_a_short_text() -> None:
    root: Node = Index("q")
    for _ in range(30):
        root = root + root * Index("k")
    assert len(text(root)) < 2000
    assert_same(root, {})
    # Names of shared parts make way for captured ones.
    taken = {"t1": Tensor("t1", "int", 1)}
    root = root + Load(taken["t1"], (Index("h"),))
    assert_same(root + root, taken)


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("(q - k).abs()", "abs(q - k)"),
        ("s.sin().tanh()", "tanh(sin(s))"),
        ("(q - k).clamp(-5, 5)", "minimum(maximum(q - k, -5), 5)"),
        ("(q - k).clip(max=5)", "minimum(q - k, 5)"),
        ("q.min(k).max(3)", "maximum(minimum(q, k), 3)"),
        ("q.float().sqrt()", "sqrt(q)"),
        ("(q < k).int()", "where(q < k, 1, 0)"),
        ("s.pow(2)", "s * s"),
        ("ids[b][q]", "ids[b, q]"),
        ("pattern[h][q, k]", "pattern[h, q, k]"),
        ("q >> 6", "q // 64"),
        ("q & 63", "q % 64"),
        ("63 & q", "q % 64"),
        ("q << 3", "q * 8"),
        ("q >> 40", "where(q < 0, -1, 0)"),
        ("~q", "-1 - q"),
        ("(q ^ q) | (k & k)", "k"),
        ("w & 0 | w & -1", "w"),
    ],
)
def test_other_ways_to_write_the_same_are_read_as_it(captured: Any, source: str, same: str) -> None:
    root = parse(source, captured, score=True)
    assert root is parse(same, captured, score=True)
    assert_same(root, captured)


def test_text_is_read_in_one_form() -> None:
    assert text(parse("((((q))>=k))")) == "q >= k"
    assert text(parse("q+0*k- -3")) == "q + 3"
    assert parse("True & (q >= k)") is parse("q >= k")
    assert parse("+q") is Index("q")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("q and k", "write `&` for `and`"),
        ("not q", "write `~` for `not`"),
        ("q if k else h", r"write where\(condition, a, b\)"),
        ("q < k < 3", r"write \(a < b\) & \(b < c\)"),
        ("q is k", "compare with <"),
        ("q in k", "compare with <"),
        ("ids[b, q:]", "slices are not in the language"),
        ("q ** 2", r"write x \* x"),
        ("q << -2", "`<< -2` has a negative count"),
        ("q >= k & q - k < w", "compares what `&` or `|` gives; put each comparison in parentheses"),
        ("q @ k", "is not in the language"),
        ("(q - k).sum()", "which is not in the language"),
        ("q.clamp(0, 1, 2)", "arguments that it does not take"),
        ("q.clamp(low=0)", "arguments that it does not take"),
        ("q.clamp()", "without limits does nothing"),
        ("torch.abs(q)", "calls torch.abs, which is not in the language"),
        ("ids[b][q][k]", "ids has 2 dimensions and got 3 indices"),
        ("ids[b] < 3", "ids has 2 dimensions and got 1 indices"),
        ("q[b][k]", "q is not a captured tensor"),
        ("__import__('os').system('true')", "is not in the language; functions are abs"),
        ("math.exp(s)", "calls math.exp, which is not in the language"),
        ("q.real", "write names without dots"),
        ("exp(s, s)", "gives exp 2 arguments; it takes 1"),
        ("exp(x=s)", "calls exp"),
        ("foo < 3", "foo is not a known name; known are s, b, h, q, k, q_len, k_len, w"),
        ("'text'", "is not a number"),
        ("1j * q", "is not a number"),
        ("(lambda: 0)()", "is not in the language"),
        ("[q for q in k]", "is not in the language"),
        ("q[1]", "q is not a captured tensor"),
        ("ids < 3", "is a tensor of 2 dimensions and has to be indexed"),
        ("ids[q] < 3", "ids has 2 dimensions and got 1 indices"),
        ("lengths[1.5]", "index 0 of lengths is a float"),
        ("lengths[-1]", "indices count from 0"),
        ("q +", r"is not an expression \(invalid syntax\)"),
        ("", "is not an expression"),
        ("q; k", "is not an expression"),
        ("(q < k) & k", "combines two conditions or two whole numbers, and one side is a whole number"),
        ("~s", "`~` negates conditions and whole numbers"),
        ("q // 1.5", "takes whole numbers"),
        ("q // 0", "division by zero"),
        ("2147483648", "does not fit the 32-bit integers"),
        ("where(q, 1, 2)", "wants a condition first"),
        ("log(-1.0)", "nan is not a constant"),
        ("nan", "nan is not a known name"),
        ("(" * 300 + "q" + ")" * 300 + "+", "is not an expression"),
        ("-" * 400 + "q", "nested more than 200 deep"),
        ("q" * 100_001, "at most 100000 are read"),
    ],
)
def test_what_is_not_in_the_language_is_refused_with_its_place(captured: Any, source: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        parse(source, captured, score=True)
    assert len(str(caught.value)) < 400


def test_masks_do_not_know_the_score() -> None:
    with pytest.raises(TraceError, match="s is not a known name"):
        parse("s > 0")


def test_an_error_inside_quotes_the_part_it_is_about() -> None:
    with pytest.raises(TraceError, match=r"^in 'on & k': `&` combines"):
        parse("(q >= k) & (on & k)", {"on": Scalar("on", "bool")})


def test_constants_keep_their_type() -> None:
    assert parse("1") is Const(1)
    assert parse("1.0") is Const(1.0)
    assert parse("True") is Const(True)
    assert parse("-0.0") is Const(-0.0)
