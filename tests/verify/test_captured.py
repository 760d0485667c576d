"""Values for captured tensors: as large as indices need, hostile enough to show a mistake, and always the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.spec.text.reading import spec_from_dict
from flashgen.verify import Case, run_case
from flashgen.verify.cases.captured import with_values
from flashgen.verify.expectation import expect

CASE = Case("drawn", 7, 11, batch=2, heads=3, heads_kv=3)


def spec_of(mask: str = "q >= k", score: str = "s", **captured: Any) -> fg.AttentionSpec:
    return spec_from_dict({"head_dim": 16, "mask": {"where": mask}, "score": score, "captured": captured})


@pytest.mark.parametrize(
    ("texts", "captured", "shapes"),
    [
        ({"mask": "ids[b, q] == ids[b, k]"}, {"ids": "int32[2]"}, {"ids": (2, 11)}),
        ({"score": "s + t[0, h, q, k]"}, {"t": "float32[4]"}, {"t": (1, 3, 7, 11)}),
        ({"score": "s + t[h, maximum(k - q, 0) + n]"}, {"t": "bfloat16[2]", "n": 5}, {"t": (3, 16)}),
        ({"mask": "p[q // 2, k // 4]"}, {"p": "bool[2]"}, {"p": (4, 3)}),
        ({"mask": "k < n"}, {"n": "int64[0]"}, {"n": ()}),
    ],
)
def test_sizes_are_what_the_indices_need(texts: Any, captured: Any, shapes: Any) -> None:
    tensors = with_values(spec_of(**texts, **captured), CASE).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    assert {name: f"{t.dtype}[{t.ndim}]" for name, t in tensors.items()} == {
        name: text for name, text in captured.items() if isinstance(text, str)
    }


def test_indices_from_the_end_reach_further_where_less_of_a_sequence_is_used() -> None:
    """The oracle, and a kernel on the emulator, refuse an index that is out of bounds."""
    spec = replace(spec_of(score="s + t[k - (q + (k_len - q_len)) + 20]", t="float32[1]"), varlen=True)
    whole = with_values(spec, replace(CASE, batch=1)).tensors["t"].shape
    for seed in range(8):
        case = replace(CASE, seed=seed)
        expect(spec, case)
        used = case.packing_for(spec).used
        furthest = max((len_q - 1 for len_q, len_kv in used if len_q and len_kv), default=0)
        assert with_values(spec, case).tensors["t"].shape == (max(whole[0], furthest + 21),)


def test_a_tensor_of_indices_comes_first_and_what_it_indexes_is_large_enough() -> None:
    spec = spec_of(score="s + table[ids[b, k], h]", ids="int8[2]", table="float16[2]")
    for seed in range(8):
        tensors = with_values(spec, replace(CASE, seed=seed)).tensors
        assert tensors["ids"].min() >= 0
        assert tensors["table"].shape == (tensors["ids"].max() + 1, 3)


def test_equal_cases_have_equal_values_and_other_seeds_have_others() -> None:
    spec = spec_of("ids[b, q] == ids[b, k]", ids="int32[2]")
    first, again, other = (with_values(spec, case).tensors["ids"] for case in (CASE, CASE, replace(CASE, seed=1)))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_one_tensor_of_mask_and_score_gets_one_value() -> None:
    spec = with_values(spec_of("a[k] > 0", "s + a[q] + b2[q]", a="float32[1]", b2="float32[1]"), CASE)
    assert spec.mask.traced.tensors["a"] is spec.score.traced.tensors["a"]
    assert not np.array_equal(spec.tensors["a"][:7], spec.tensors["b2"])


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_index_gives_tensors_that_are_not_empty(len_q: int, len_kv: int) -> None:
    case = replace(CASE, len_q=len_q, len_kv=len_kv)
    spec = with_values(spec_of("ids[b, q] == other[b, k]", ids="int32[2]", other="int32[2]"), case)
    assert all(tensor.size for tensor in spec.tensors.values())


@pytest.mark.parametrize(
    ("text", "captured", "words"),
    [
        ("t[k - q] > 0", {"t": "int32[1]"}, "dimension 0 of t is indexed with -6 when there are 7 queries and 11 keys"),
        ("t[t[k]] > 0", {"t": "int32[1]"}, "t index each other"),
    ],
)
def test_what_cannot_be_drawn_is_said(text: str, captured: Any, words: str) -> None:
    with pytest.raises(SpecError) as error:
        with_values(spec_of(text, **captured), CASE)
    assert words in str(error.value)


def test_a_kernel_without_values_is_verified_with_drawn_ones() -> None:
    spec = spec_of("(q >= k) & (ids[b, q] == ids[b, k])", "s + t[h]", ids="int32[2]", t="float32[1]")
    spec = replace(spec, direction="forward")
    kernel = fg.build(spec, target="emulator")
    given: list[Any] = []

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, captured: Any) -> Any:
        given.append(captured)
        return kernel(q, k, v, scale=scale, captured=captured)

    assert all(result.check.ok for result in run_case(run, spec, expect(spec, CASE)))
    assert sorted(given[0]) == ["ids", "t"]
    # Another ids or t would show.
    for name in ("ids", "t"):
        wrong = {
            **given[0],
            name: given[0][name]
            + np.arange(given[0][name].size).reshape(given[0][name].shape).astype(given[0][name].dtype),
        }
        results = run_case(lambda *a, captured, wrong=wrong: run(*a, wrong), spec, expect(spec, CASE))
        assert not all(result.check.ok for result in results)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_table_keeps_the_width_that_its_kernel_was_built_for(length: int) -> None:
    spec = fg.AttentionSpec(16, score=fg.relative_bias(np.zeros((2, 9), np.float32)))
    drawn = with_values(spec, replace(CASE, len_q=length, len_kv=length))
    assert drawn.tensors["table"].shape[1] == 9
