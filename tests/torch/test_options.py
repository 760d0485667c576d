"""Options of a wrong type are refused with a sentence, by every function that takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn")
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.torch.caches import Caches  # noqa: E402

ARRAY, HUGE = np.zeros(3), 10**400
#: Tensors of one element that is no real number.
TENSORS = torch.tensor(True), torch.tensor(0.5j)
FLAG, NUMBER = "is not a bool; pass True or False", "is not a number; pass a Python float"


def packed(function: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    starts = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
    return function(q[0], k[0], v[0], *starts, 9, 12, **options)


def cached(function: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    at = Caches()
    return function(at.q, at.k_cache, at.v_cache, **{"cache_seqlens": at.seqlens, **at.places, **options})


CALLS = {
    "attention": lambda *a, **o: fg.attention(*a, **o),
    "flash_attn": lambda *a, **o: fa2.flash_attn_func(*a, **o),
    "flash_attn varlen": lambda *a, **o: packed(fa2.flash_attn_varlen_func, *a, **o),
    "flash_attn cache": lambda *a, **o: cached(fa2.flash_attn_with_kvcache, *a, **o),
    "FlashAttention-3": lambda *a, **o: fa3.flash_attn_func(*a, **o),
    "FlashAttention-3 varlen": lambda *a, **o: packed(fa3.flash_attn_varlen_func, *a, **o),
    "FlashAttention-3 cache": lambda *a, **o: cached(fa3.flash_attn_with_kvcache, *a, **o),
}
WRONG = [
    *(("attention", "deterministic", value, FLAG) for value in (3, 1, "yes", ARRAY)),
    *(("attention", "return_lse", value, FLAG) for value in (3, None, ARRAY)),
    *(("attention", "dropout_p", value, NUMBER) for value in ("0.1", None, True, ARRAY, *TENSORS)),
    ("attention", "dropout_p", HUGE, "is larger than any float"),
    ("attention", "dropout_p", float("nan"), "is no probability"),
    *(("attention", "layout", value, "is unknown; use 'bshd' or 'bhsd'") for value in (ARRAY, 3, ["bshd"])),
    ("attention", "sequences", torch.ones(10_000), "says not where sequences begin"),
    *((name, "causal", value, FLAG) for name in CALLS if name != "attention" for value in (3, "no", ARRAY)),
    *((name, "deterministic", ARRAY, FLAG) for name in CALLS if name != "attention" and "cache" not in name),
    *((name, "return_attn_probs", 3, FLAG) for name in CALLS if name != "attention" and "cache" not in name),
    *((name, "return_softmax_lse", ARRAY, FLAG) for name in CALLS if "cache" in name),
    *((name, "rotary_interleaved", 1, FLAG) for name in CALLS if "cache" in name),
    *((n, "softcap", value, NUMBER) for n in CALLS if n != "attention" for value in ("a", None, ARRAY, *TENSORS)),
    *((name, "softcap", HUGE, "is larger than any float") for name in CALLS if name != "attention"),
    *((name, "dropout_p", "a", NUMBER) for name in CALLS if name in ("flash_attn", "flash_attn varlen")),
    *((name, "attention_chunk", v, "is not a length") for name in CALLS if "3" in name for v in (True, "a", ARRAY)),
    *((name, "cache_seqlens", HUGE, "does not fit 32 bits") for name in CALLS if "cache" in name),
]


@pytest.mark.parametrize(("call", "option", "value", "words"), WRONG)
def test_a_wrong_type_is_refused_by_name(
    emulated: Any, inputs: Any, call: str, option: str, value: Any, words: str
) -> None:
    with pytest.raises(fg.ArgumentError, match=f"(?s)^{option}=.*{words}") as error:
        CALLS[call](*inputs(batch=1), **{option: value})
    assert len(str(error.value)) < 300
    assert emulated == []


def test_numbers_and_bools_of_numpy_are_taken(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    plain = fg.attention(q, k, v, mask=fg.causal(), score=fg.softcap(2.0))
    options = {"causal": np.bool_(True), "softcap": np.float32(2), "dropout_p": 0}
    assert torch.equal(fa2.flash_attn_func(q, k, v, **options), plain)
