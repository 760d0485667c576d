"""dQ that is summed in a fixed order, by the backward kernels for Hopper on the emulator: the same bits in whichever
order warps and blocks run and however few blocks there are, and as near to the oracle's as without the promise.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.verify import Case, Mode, expect
from tests.drawn import IS_SAMPLE, some
from tests.kernels.test_backward_sm90 import DIMS, SPECS, built, check
from tests.kernels.test_forward_sm90 import CASES, LONGEST, NAME, drawn_case, drawn_mode

pytestmark = pytest.mark.in_turns(24)

#: Masks that differ in who adds before whom, and what makes dS another product.
NAMES = ("full", "causal", "window", "documents", "holes", "softcap")
#: A developer's run takes half of these, for one width each, which is another one for each.
DRAWN = [
    (dim, name)
    for number, name in enumerate(some(NAMES, *NAMES[1::2]))
    for dim in some(DIMS, DIMS[(2 * number + 1) % len(DIMS)])
]
#: Many blocks at once, and only one; who comes first, and who comes last.
MODES: list[dict[str, Any]] = [
    {"schedule": "reverse"},
    {"schedule": "reverse", "resident": 3},
    {"schedule": "random", "seed": 1, "resident": 3},
    {"schedule": "random", "seed": 2},
    {"schedule": "priority", "seed": 3, "resident": 3},
    {"schedule": "priority", "seed": 4, "resident": 1},
    {"race": True, "schedule": "random", "seed": 5, "resident": 3},
]


def ordered(name: str, dim: int = 64, **fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(dim, deterministic=True, **SPECS[name] | fields)


@pytest.mark.parametrize(("dim", "name"), DRAWN)
def test_gradients_are_within_their_bounds_and_nothing_is_found(dim: int, name: str) -> None:
    random = Random(f"ordered {dim} {name}")
    for number in range(CASES):
        spec = ordered(name, dim, dtype=("bf16", "fp16")[number % 2])
        main = built(spec).plan.kernel("main")
        case = drawn_case(random, spec, int(main.constant("tile_q")), int(main.constant("tile_kv")))
        check(spec, expect(spec, case, any_values=True), drawn_mode(random), NAME if case.len_q else "FlashAttention-2")


def bits(kernel: fg.Kernel, arrays: Any, captured: Any, options: dict[str, Any]) -> list[bytes]:
    """Those of the gradients, under that order."""
    kernel.target.options = options
    try:
        return [x.tobytes() for x in kernel.backward(*arrays, captured=captured)]
    finally:
        kernel.target.options = {}


def forward(kernel: fg.Kernel, x: Any, captured: Any) -> Any:
    return (x.do, x.q, x.k, x.v, *kernel(x.q, x.k, x.v, captured=captured))


@pytest.mark.parametrize("name", some(NAMES, "documents"))
def test_every_order_gives_the_same_bits(name: str) -> None:
    """Three blocks, and four tiles of keys for each of two heads, which two heads of queries share."""
    spec = ordered(name)
    expected = expect(spec, Case("several tiles", 300, LONGEST, heads=4, heads_kv=2))
    kernel, captured = built(spec), expected.captured or None
    arrays = forward(kernel, expected.inputs, captured)
    first = bits(kernel, arrays, captured, {})
    # A developer's run takes every other order for one mask, and the others for the next.
    for options in MODES if not IS_SAMPLE else MODES[NAMES.index(name) // 2 % 2 :: 2]:
        assert bits(kernel, arrays, captured, options) == first, options


def test_many_tiles_of_keys_add_in_one_order() -> None:
    """More than those that run at the same time."""
    spec = ordered("causal")
    expected = expect(spec, Case("groups", 150, 2200, heads=1))
    check(spec, expected, Mode("random", seed=6))
    kernel = built(spec)
    arrays = forward(kernel, expected.inputs, None)
    first = bits(kernel, arrays, None, {})
    for options in MODES[:3]:
        assert bits(kernel, arrays, None, options) == first, options


def test_nobody_waits_for_tiles_of_keys_beyond_the_last_key() -> None:
    """Whose queries would be more, were the last tile whole."""
    spec = fg.AttentionSpec(64, mask=fg.window(10, 5, align="top-left"), deterministic=True)
    check(spec, expect(spec, Case("queries beyond", 500, 300, heads=1)), Mode("reverse"))


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch() -> None:
    spec = ordered("causal")
    x = Case("batch", 140, 300, batch=2, heads=2).inputs(spec)
    kernel = built(spec)
    arrays = forward(kernel, x, None)
    whole = kernel.backward(*arrays)
    for one in range(2):
        alone = kernel.backward(*(a[one : one + 1] for a in arrays))
        assert [a.tobytes() for a in alone] == [w[one : one + 1].tobytes() for w in whole]


@pytest.mark.parametrize("name", some(["causal", "documents"], "documents"))
def test_non_finite_keys_add_to_dq_in_order(name: str) -> None:
    """Pair by pair, before tiles of keys that are added by TMA, and after others."""
    spec = ordered(name)
    case = Case("bad keys", 200, 300, heads=2)
    x, captured = case.inputs(spec), expect(spec, case).captured or None
    for key in (50, 190):
        x.k[:, key, :, 3] = np.nan
    kernel = built(spec)
    arrays = forward(kernel, x, captured)
    first = bits(kernel, arrays, captured, {})
    assert all(np.isnan(np.frombuffer(b, spec.element.numpy()).astype(np.float32)).any() for b in first[:2])
    for options in MODES:
        assert bits(kernel, arrays, captured, options) == first, options
