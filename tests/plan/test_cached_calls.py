"""Which kernel of a plan a call with a cache runs."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.plan import plan
from flashgen.plan.algorithm import why_not_fa3
from flashgen.plan.cached_calls import CachedCall, attending_kernel, suits_boxes
from flashgen.plan.model.plans import AttentionPlan, Problem
from flashgen.spec import AttentionSpec, Schedule, causal

E4M3 = {"dtype": "e4m3", "cache_dtype": "e4m3"}


def planned(arch: str = "sm_90a", schedule: Schedule | None = None, access: int | None = None, **fields: Any) -> Any:
    given: dict[str, Any] = {"head_dim": 128, "mask": causal(), "direction": "forward", "cache": "paged", **fields}
    return plan(AttentionSpec(**given), schedule, arch, access_bytes=access)


def role(attention: AttentionPlan, len_q: int, len_kv: int = 4096, **call: Any) -> str:
    return attending_kernel(attention, Problem(4, 32, 8, len_q, len_kv), CachedCall(**call)).role


@pytest.mark.parametrize(
    ("arch", "fields", "roles"),
    [
        ("sm_80", {}, ["decode", "forward"]),
        ("sm_90a", {}, ["decode", "prefill"]),
        ("sm_90a", {"dtype": "fp32"}, ["forward", "forward"]),
        ("sm_90a", {"cache_dtype": "e4m3"}, ["decode", "decode"]),
        ("sm_90a", E4M3, ["decode", "prefill"]),
        ("sm_90a", {**E4M3, "page_scales": True}, ["decode", "decode"]),
        ("sm_80", {"cache_dtype": "e4m3"}, ["decode", "decode"]),
        ("sm_90a", {"head_dim": 64, "head_dim_v": 512, "qv": True}, ["decode", "decode"]),
    ],
    ids=str,
)
def test_the_number_of_queries_decides(arch: str, fields: Any, roles: list[str]) -> None:
    attention = planned(arch, **fields)
    assert [role(attention, n) for n in (63, 64)] == roles


@pytest.mark.parametrize(
    ("call", "roles"),
    [
        ({"page_size": 64}, ["decode", "prefill"]),
        ({"page_size": 12}, ["decode", "forward"]),
        ({"page_size": 64, "has_leftpad": True}, ["decode", "forward"]),
        ({"has_leftpad": True}, ["decode", "prefill"]),
        ({"splits": 3}, ["decode", "forward"]),
        ({"batch_invariant": True}, ["decode", "decode"]),
    ],
    ids=str,
)
def test_so_does_what_copies_in_boxes_need(call: Any, roles: list[str]) -> None:
    attention = planned()
    assert [role(attention, n, **call) for n in (1, 64)] == roles


def test_without_room_for_keys_there_is_nothing_to_decode() -> None:
    assert role(planned(), 1, 0) == "forward"
    assert role(planned(**E4M3), 1, 0) == "decode"


@pytest.mark.parametrize("fields", [{}, {"head_dim": 64, "head_dim_v": 512, "qv": True}], ids=str)
def test_boxes_do_not_reach_keys_behind_a_left_pad_in_pages(fields: Any) -> None:
    in_boxes, without = planned(**fields).kernel("decode"), planned(access=8, **fields).kernel("decode")
    padded = CachedCall(page_size=64, has_leftpad=True)
    assert [suits_boxes(kernel, padded) for kernel in (in_boxes, without)] == [False, True]
    assert suits_boxes(in_boxes, CachedCall(page_size=64))
    assert suits_boxes(in_boxes, CachedCall(has_leftpad=True))


def test_pages_of_one_key_are_not_copied_in_boxes() -> None:
    in_boxes, without = planned().kernel("decode"), planned(access=8).kernel("decode")
    assert [suits_boxes(kernel, CachedCall(page_size=1)) for kernel in (in_boxes, without)] == [False, True]
    assert suits_boxes(in_boxes, CachedCall(page_size=2))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache_dtype": "e4m3"}, "wgmma would read e4m3 keys and values from shared memory"),
        ({"cache_dtype": "e5m2", "dtype": "fp16"}, "wgmma would read e5m2 keys"),
        (E4M3, "converts them to fp16 in registers"),
        ({"head_dim": 84}, "head dims must be multiples of 8"),
        ({"access": 8}, "TMA needs tensors aligned to 16 bytes"),
    ],
    ids=str,
)
def test_the_portable_decode_kernel_says_why_hoppers_does_not_run(fields: Any, words: str) -> None:
    reasons = planned(**fields).kernel("decode").reasons
    assert any(reason.startswith("not by wgmma and TMA: ") and words in reason for reason in reasons)
    fields = {name: value for name, value in fields.items() if name != "access"}
    assert not any(
        "wgmma" in reason
        for reason in planned("sm_80" if "dtype" not in fields else "sm_89", **fields).kernel("decode").reasons
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (E4M3, "64 new tokens and more run the kernel prefill"),
        ({"cache_dtype": "e4m3"}, "not for FlashAttention-3: it multiplies queries and keys of one dtype"),
        ({"cache_dtype": "e5m2"}, "these are bf16 and e5m2"),
        ({**E4M3, "page_scales": True}, "not for FlashAttention-3: it takes no scales of pages"),
        ({**E4M3, "head_dim": 72}, "multiples of 16"),
    ],
    ids=str,
)
def test_the_only_kernel_of_a_cache_says_what_runs_prompts(fields: Any, words: str) -> None:
    assert any(words in reason for reason in planned(**fields).kernel("decode").reasons)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "the kernel prefill is; this one takes num_splits, left pads in pages, and pages of a size"),
        ({"dtype": "fp32"}, "dtype is 'fp32'"),
        ({"head_dim": 84}, "head dims must be multiples of 8"),
        ({"schedule": Schedule(tile_kv=32)}, "its kernel for a cache has one schedule"),
        ({"arch": "sm_90"}, "it needs sm_90a"),
    ],
    ids=str,
)
def test_on_hopper_the_forward_kernel_says_why_it_is_not_flash_attention_3(fields: Any, words: str) -> None:
    attention = planned(**fields)
    assert words in str(why_not_fa3(attention.kernel("forward")))
    assert attention.has("prefill") == (fields == {})
