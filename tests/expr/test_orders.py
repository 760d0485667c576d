"""A mask is the conjunction of its comparisons of the key and the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.analysis.hoisting import with_keys_apart
from flashgen.expr.analysis.key_orders import is_comparison_of_key, leaves, orders
from flashgen.expr.readings.numpy import evaluate_all
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.nodes import USES
from flashgen.expr.tree.text import text


@pytest.mark.parametrize("seed", range(60))
def test_both_parts_are_the_mask(draw: Any, seed: int) -> None:
    random = draw(seed)
    mask = with_keys_apart(random.bool_(4))
    found = orders(mask)
    env = {**random.values(19, 22), "b": 1, "h": 2, "q": np.arange(19)[:, None], "k": np.arange(22)[None, :]}
    both, whole = evaluate_all([found.ordered & found.rest, mask], env)
    np.testing.assert_array_equal(both, whole, text(mask))
    for place, value in leaves(found.ordered).items():
        assert not value.uses & USES["k"]
        assert place is value or is_comparison_of_key(place)


@pytest.mark.parametrize(
    ("source", "ordered", "rest"),
    [
        ("(q >= k) & (ids[b, q] == ids[b, k])", "k <= q", "ids[b, q] == ids[b, k]"),
        ("(q >= k) | (k < n)", "(k <= q) | (k < n)", "True"),
        ("~((q >= k) | (k < n)) & on & seen[q]", "~((k <= q) | (k < n)) & on & seen[q]", "True"),
        ("(q - k < 5) & (k % 2 == 0)", "k >= q - 4", "k % 2 == 0"),
        # The sum might overflow, so the key is not moved to one side.
        ("q - k < w", "True", "q - k < w"),
        ("(q >= k) | seen[k]", "True", "(k <= q) | seen[k]"),
        ("k == q", "True", "k == q"),
        ("2 * k <= q", "True", "k * 2 <= q"),
    ],
)
def test_comparisons_of_keys_are_orders(captured: dict[str, Any], source: str, ordered: str, rest: str) -> None:
    found = orders(with_keys_apart(parse(source, captured)))
    assert (text(found.ordered), text(found.rest)) == (ordered, rest)
