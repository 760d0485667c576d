"""How far from the oracle the gradient of a captured tensor may be.

The rule of ``bounds``: at most twice the largest error of one run in the spec's dtype, and rounding steps of the
largest element. An element may be the sum of very many terms that cancel, of which one run is an accident. So a
step is at least what the roundings of a run do to an element when they fall at random: D of a whole row at once,
through each element of O; with fp32 inputs also dP of each pair, and P of a whole row, through its LSE. To that
come a float32 step of the sum of magnitudes, because slopes are float32 and terms are summed in it, and one step
of the tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.dtypes import ALIASES, FP32
from flashgen.oracle.attention import HeadRules, forward_head
from flashgen.oracle.bounds import FACTOR, FP32_ROUNDING_STEPS, ROUNDING_STEPS
from flashgen.oracle.captured import CapturedSums, captured_gradients, sink_column
from flashgen.oracle.problem import Array, Problem, gradient_of_lse, read_problem
from flashgen.oracle.reach import largest
from flashgen.oracle.rounded import evaluate
from flashgen.oracle.rules import Floats, Lengths, Rules
from flashgen.spec import AttentionSpec, Dropout


def captured_bounds(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    scale: float | None = None,
    captured: Mapping[str, Any] | None = None,
    exact: Mapping[str, Floats] | None = None,
    dlse: Any = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
) -> dict[str, float]:
    """The largest allowed error of each captured gradient, by name; ``exact`` is the oracle's where known."""
    options: dict[str, Any] = {
        "scale": scale,
        "captured": captured,
        "dlse": dlse,
        "dropout": dropout,
        "lengths": lengths,
    }
    exact = exact or captured_gradients(spec, q, k, v, do, **options)
    one_run = evaluate(spec, q, k, v, do, **options).captured
    given = read_problem(spec, q, k, v, do, scale=scale)
    rules = Rules(spec, given, captured, dropout, lengths)
    reach, magnitudes = _reach(spec, given, gradient_of_lse(given, dlse), rules, captured)
    steps = FP32_ROUNDING_STEPS if spec.element is FP32 else ROUNDING_STEPS
    limits = {}
    for name, reference in exact.items():
        size = largest(reference)
        limits[name] = (
            FACTOR * largest(one_run[name] - reference)
            + steps * spec.element.epsilon * max(size, np.sqrt(largest(reach[name])))
            + FP32.epsilon * largest(magnitudes[name])
            + _epsilon({**spec.tensors, **(captured or {})}[name]) * size
        )
    return limits


def _reach(
    spec: AttentionSpec, given: Problem, of_lse: Array, rules: Rules, captured: Mapping[str, Any] | None
) -> tuple[Mapping[str, Floats], Mapping[str, Floats]]:
    """The expected square of each element's error, in rounding steps, and the sum of its terms' magnitudes."""
    assert given.do is not None, "do was given"
    squares, magnitudes = CapturedSums(spec, rules, captured), CapturedSums(spec, rules, captured, magnitudes=True)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(given.batch, given.heads):
            h_kv = h // given.group
            q_h, k_h, v_h, do_h = given.q[b, :, h], given.k[b, :, h_kv], given.v[b, :, h_kv], given.do[b, :, h]
            of_head = HeadRules(rules, b, h)
            head = forward_head(q_h, k_h, v_h, given.scale, of_head)
            logits, dp, p = (
                given.scale * (q_h @ k_h.T),
                of_head.keep(do_h @ v_h.T),
                np.where(of_head.allowed, head.p, 0.0),
            )
            row_sum, of_o = (do_h * head.o).sum(axis=1) - of_lse[b, h], np.sqrt(np.square(do_h * head.o).sum(axis=1))
            ds = np.where(p == 0.0, 0.0, p * (dp - row_sum[:, None]))
            sink = sink_column(of_head.sink, head.lse)
            squares.add_squares(logits, p * of_o[:, None], b, h, by_row=True)
            squares.add_sink(sink * of_o, b, h, squares=True)
            if spec.element is FP32:
                squares.add_squares(logits, np.where(p == 0.0, 0.0, p * dp), b, h)
                squares.add_squares(logits, ds, b, h, by_row=True)
                squares.add_sink(sink * row_sum, b, h, squares=True)
            magnitudes.add_pairs(logits, ds, b, h)
            magnitudes.add_sink(sink * row_sum, b, h)
    return squares.values, magnitudes.values


def _epsilon(tensor: Any) -> float:
    """Half a step of the tensor's dtype."""
    from flashgen.expr import element_type

    name = element_type(tensor)
    return ALIASES[name].epsilon if name in ALIASES else FP32.epsilon
