"""FlashAttention-3's published matrix of tests, for its dense function and its combination of splits.

The rule: an error of at most twice that of the same formula in the inputs' dtype, three times where logits are capped,
what adding 0.3 and taking it off again costs, and 1e-5 where a gradient is 0 by its formula. DRAWN_CASES=nightly takes
all of it, otherwise a sample.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from tests.gpu.flash_attn_matrix import HEADS, WHOLE, band, distances, reach_of_rounding_out, references, run

torch = pytest.importorskip("torch")
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

#: Head dimensions of queries and keys, and of values.
DIMS = ((64, 64), (64, 256), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LENGTHS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023)),
    *((4096, 4096), (4224, 4224)),
)
BATCH = 2
_RULES = [
    (causal, local, cap, deterministic)
    for causal, local in ((False, False), (True, False), (False, True))
    for cap in (0.0, 50.0)
    for deterministic in (False, True)
]
_ALL = [(dims, dtype, *rules) for dims in DIMS for dtype in ("float16", "bfloat16") for rules in _RULES]
#: Every dim twice, every combination of rules once.
_SAMPLE = [
    (DIMS[n % len(DIMS)], ("float16", "bfloat16")[n // len(DIMS) % 2], *_RULES[n % len(_RULES)]) for n in range(14)
]


def inputs(dims: tuple[int, int], dtype: Any, lengths: tuple[int, int], heads: tuple[int, int], size: float) -> Any:
    (len_q, len_kv), (heads_q, heads_kv) = lengths, heads
    shapes = ((len_q, heads_q, dims[0]), (len_kv, heads_kv, dims[0]), (len_kv, heads_kv, dims[1]))
    made = [torch.randn(BATCH, *shape, device="cuda") * s for shape, s in zip(shapes, (size, 1.0, 1.0), strict=True)]
    return tuple(x.to(dtype).requires_grad_() for x in made)


@pytest.mark.parametrize(("dims", "dtype", "causal", "local", "cap", "deterministic"), _ALL if WHOLE else _SAMPLE)
def test_output_and_gradients(
    plain_outputs: None, dims: Any, dtype: str, causal: bool, local: bool, cap: float, deterministic: bool
) -> None:
    torch.manual_seed(0)
    for number, lengths in enumerate(LENGTHS):
        # Scores of all heads in float32 take gigabytes at the longest.
        each = ((2, 2), (2, 1)) if lengths[0] > 4000 else tuple(HEADS.values())
        for heads in each if WHOLE else each[number % len(each) :][:1]:
            window = (max(lengths[1] // 3, min(1, lengths[1] - 1)), lengths[1] // 5) if local else (-1, -1)
            tensors = inputs(dims, getattr(torch, dtype), lengths, heads, cap or 1.0)
            options = {"causal": causal, "window_size": window, "softcap": cap, "deterministic": deterministic}
            attend = partial(fa3.flash_attn_func, **options, num_splits=1 + number % 3, pack_gqa=number % 2 == 0)
            distance = distances(*lengths)
            rules = band(distance, causal, window), distance.abs(), cap, None
            do = torch.randn(BATCH, lengths[0], heads[0], dims[1], device="cuda").to(tensors[0].dtype)
            judge(run(attend, tensors, do), tensors, do, rules)


def judge(found: Any, tensors: Any, do: Any, rules: Any) -> None:
    exact, rounded = references(tensors, do, rules)
    reach = reach_of_rounding_out(tensors, do, exact[0], rules) if rules[2] else (0.0, 0.0)
    steps = {name: torch.finfo(do.dtype).eps * size for name, size in zip(("dq", "dk"), reach, strict=True)}
    for name, *results in zip(("out", "dq", "dk", "dv"), found, rounded, exact, strict=True):
        ours, theirs, right = (x.float() for x in results)
        step = 2 * (results[2] + 0.3 - 0.3 - results[2]).abs().max().float()
        slack = step + (3e-4 if rules[2] and name != "out" else 1e-5) + steps.get(name, 0.0)
        limit = (3 if rules[2] else 2) * (theirs - right).abs().max() + slack
        error = (ours - right).abs().max()
        assert error <= limit, f"{name} of {tuple(tensors[0].shape)}: error {error:.3g}, limit {limit:.3g}"


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256] if WHOLE else [64, 192])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_number_of_splits_is_combined_to_the_same(plain_outputs: None, dim: int, dtype: str) -> None:
    """Up to 133 of them, some without keys; the log-sum-exp to 1e-5."""
    torch.manual_seed(0)
    caches = [torch.randn(BATCH, 5000, 2, dim, device="cuda").to(getattr(torch, dtype)) for _ in range(2)]
    lengths = torch.tensor([5000, 70], dtype=torch.int32, device="cuda")
    for len_q, causal in itertools.product((1, 2, 3, 113), (False, True)):
        q = torch.randn(BATCH, len_q, 6, dim, device="cuda").to(caches[0].dtype)
        options = {"cache_seqlens": lengths, "causal": causal, "return_softmax_lse": True}
        whole, whole_lse = fa3.flash_attn_with_kvcache(q, *caches, **options, num_splits=1)
        for splits in (2, 3, 5, 17, 32, 55, 97, 133):
            out, lse = fa3.flash_attn_with_kvcache(q, *caches, **options, num_splits=splits)
            torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)
            step = torch.finfo(out.dtype).eps
            torch.testing.assert_close(out.float(), whole.float(), atol=step, rtol=step)
