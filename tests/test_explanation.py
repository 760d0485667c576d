"""``flashgen.explain``: the map is what the mask leaves of each tile, and drawing it never looks at pairs."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.explanation import EMPTY, FULL, PARTIAL
from flashgen.oracle import Rules
from flashgen.pipeline import candidates
from flashgen.plan import plan
from flashgen.plan.model.choices import choice_lines
from flashgen.plan.model.plans import Problem
from flashgen.spec.text.declared import Declared

RANDOM = np.random.default_rng(0)
PACKED = np.sort(RANDOM.integers(0, 5, (2, 300)), axis=1)
PATTERN = RANDOM.integers(0, 2, (5, 5)).astype(bool)
window = 70

EXACT = {
    "full": (fg.full(), 200, 300),
    "causal": (fg.causal(), 300, 300),
    "causal, more keys": (fg.causal(), 100, 300),
    "causal, more queries": (fg.causal(), 300, 100),
    "causal from the top left": (fg.causal("top-left"), 100, 300),
    "window": (fg.sliding_window(70, 5), 300, 280),
    "a function": (lambda b, h, q, k: (q >= k) & (q - k < window), 300, 300),
    "prefix": (fg.prefix_lm(100), 300, 300),
    "documents": (fg.document(PACKED), 300, 300),
    "global": (fg.window(20, 20) | fg.global_tokens(3), 300, 300),
    "chunks": (fg.chunked(50), 300, 300),
    "padding": (fg.key_padding(np.array([10, 200])), 300, 300),
    "blocks": (fg.block_sparse(PATTERN, 64), 300, 300),
    "nothing": (lambda b, h, q, k: q > q + 1, 100, 100),
}


def kinds_of_pairs(explanation: fg.Explanation) -> Any:
    """Brute force over every pair."""
    e = explanation
    problem = Problem(e.batch + 1, e.head + 1, 1, e.len_q, e.len_kv)
    allowed = Rules(e.spec, problem).allowed(e.batch, e.head)
    kinds = np.zeros(e.kinds.shape, int)
    for i, j in np.ndindex(*e.kinds.shape):
        tile = allowed[i * e.tile_q : (i + 1) * e.tile_q, j * e.tile_kv : (j + 1) * e.tile_kv]
        kinds[i, j] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
    return kinds


@pytest.mark.parametrize("tile", [(64, 64), (128, 32), (16, 48)])
@pytest.mark.parametrize("name", EXACT)
def test_the_map_is_that_of_the_pairs(name: str, tile: tuple[int, int]) -> None:
    mask, len_q, len_kv = EXACT[name]
    found = fg.explain(fg.AttentionSpec(64, mask=mask), len_q, len_kv, batch=1, head=2, tile=tile)
    brute = kinds_of_pairs(found)
    assert ((found.kinds != EMPTY) == (brute != EMPTY)).all()
    assert ((found.kinds == FULL) <= (brute == FULL)).all()
    assert (found.empty, found.partial + found.full) == ((brute == EMPTY).sum(), (brute != EMPTY).sum())


def test_flops_count_the_tiles_that_are_not_skipped() -> None:
    found = fg.explain(fg.AttentionSpec(64, head_dim_v=32, mask=fg.causal()), 100, 100, tile=(64, 64))
    assert found.kinds.tolist() == [[PARTIAL, EMPTY], [FULL, PARTIAL]]
    assert found.flops == 2 * (64 + 32) * (64 * 64 + 36 * 64 + 36 * 36)
    assert found.dense_flops == 2 * (64 + 32) * 100 * 100


def test_the_tile_is_the_plans_unless_given() -> None:
    spec = fg.AttentionSpec(128, mask=fg.causal())
    schedule = plan(spec, None, "sm_80").schedule
    found = fg.explain(spec, arch="sm_80")
    assert (found.tile_q, found.tile_kv, found.len_q, found.len_kv) == (schedule.tile_q, schedule.tile_kv, 1024, 1024)


@pytest.mark.parametrize(("capability", "arch"), [(90, "sm_90a"), (120, "sm_120"), (None, "sm_80")])
def test_the_kernel_is_that_of_the_gpu_at_hand(
    monkeypatch: pytest.MonkeyPatch, capability: int | None, arch: str
) -> None:
    """As ``build`` chooses; without a GPU it is sm_80, which the command line also begins with."""

    def get_driver() -> Any:
        if capability is None:
            raise fg.NoGpuError("no driver")
        return SimpleNamespace(capability=lambda device: capability, current_device=lambda: None)

    monkeypatch.setattr("flashgen.launch.driver.cuda.get_driver", get_driver)
    monkeypatch.setitem(sys.modules, "torch", None)
    found = fg.explain(fg.AttentionSpec(128, mask=fg.causal()), 256)
    named = fg.explain(fg.AttentionSpec(128, mask=fg.causal()), 256, arch=found.arch)
    assert found.arch == found.as_dict()["arch"] == arch
    assert str(found) == str(named)
    assert fg.explain(fg.causal(), 256).arch == arch


def test_kernels_that_may_take_the_plans_place_are_named() -> None:
    spec = fg.AttentionSpec(128, mask=fg.causal())
    found = fg.explain(spec, 256, arch="sm_90a", width=100)
    refused, unaligned = [], []
    for each in found.fallbacks:
        (refused if "too few registers" in each.when else unaligned).append(each.kernel)
    planned = [x.kernel("forward") for x in candidates(plan(spec, None, "sm_90a"))[1:]]
    assert [x.constant("tile_kv") for x in refused] == [x.constant("tile_kv") for x in planned] != []
    assert [x.algorithm for x in refused] == [x.algorithm for x in planned]
    assert [x.algorithm for x in unaligned] == ["FlashAttention-2"]
    assert str(found).count("\nelse    ") == len(found.fallbacks) == len(found.as_dict()["fallbacks"])
    assert fg.explain(spec, 256, arch="sm_80").fallbacks == ()
    assert fg.explain(fg.causal(), 256, arch="sm_90a").fallbacks == ()


def test_lengths_are_those_of_captured_tensors() -> None:
    found = fg.explain(fg.document(PACKED), tile=(64, 64))
    assert (found.len_q, found.len_kv) == (300, 300)


def test_a_million_tokens_cost_no_more_than_their_tiles() -> None:
    start = time.perf_counter()
    found = fg.explain(fg.window(1024, 0), 2**20, tile=(256, 256))
    assert time.perf_counter() - start < 20
    assert found.closed
    assert found.tiles == 4096**2
    assert found.tiles - found.empty == sum(min(i, 4) + 1 for i in range(4096))


def test_it_is_drawn() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(30.0))
    assert str(fg.explain(spec, 256, tile=(64, 64), arch="sm_80")) == (
        "mask    causal\n"
        "score   tanh(s / limit) * limit\n"
        "tiles   4 x 4 of 64 queries by 64 keys\n"
        "        batch 0, head 0, 256 queries, 256 keys\n"
        "        6 skipped (37.5%), 4 partial (25.0%), 6 full (37.5%)\n"
        "work    10.49 MFLOP of 16.78 MFLOP dense (62.5%), forward, one head\n"
        "keys    from 0\n"
        "        to before minimum(k_len, q_hi + k_len + 1 - q_len)\n"
        "queries from maximum(0, k_lo + q_len - k_len)\n"
        "        to before q_len\n"
        "found   by these bounds alone\n"
        "kernel  FlashAttention-2 for sm_80\n"
        "        backward: FlashAttention-2\n"
        "forward 128 queries of a block: tile_q 128, tile_kv 64, stages 2, warps 4\n"
        "        shared memory: 49152 of 166912 bytes: q 16384, k 16384, v 16384, o 16384\n"
        "          (over q)\n"
        "        because: 32 rows per warp use each fragment of K and V twice; registers\n"
        "          hold Q, and a second stage\n"
        "main    64 keys of a block: tile_q 128, tile_kv 64, stages 1, warps 4\n"
        "        shared memory: 82944 of 166912 bytes: k 8192, v 8192, q 16384, do 16384,\n"
        "          p 16384, ds 16384, lse 512, dsum 512\n"
        "        because: 64 x 32 scores per warp; two blocks share a multiprocessor\n"
        "\n"
        "queries down, keys across; . skipped  + partial  # full\n"
        "        0\n"
        "      0 +...\n"
        "     64 #+..\n"
        "    128 ##+.\n"
        "    192 ###+"
    )


@pytest.mark.parametrize(
    ("fields", "arch", "algorithm", "reason"),
    [
        ({}, "sm_90a", "FlashAttention-3", None),
        ({"dtype": "fp32"}, "sm_90a", "FlashAttention-2", "dtype is 'fp32'"),
        ({"head_dim": 80}, "sm_90a", "FlashAttention-3", None),
        ({"head_dim": 84}, "sm_90a", "FlashAttention-2", "head dims must be multiples of 8"),
        ({"dropout": True, "varlen": True}, "sm_90a", "FlashAttention-3", None),
        ({"cache": "paged", "direction": "forward"}, "sm_90a", "FlashAttention-3", None),
        ({"cache": "paged", "direction": "forward", "dtype": "fp32"}, "sm_90a", "FlashAttention-2", "dtype is 'fp32'"),
        ({}, "sm_90", "FlashAttention-2", "it needs sm_90a, and this is sm_90"),
        ({}, "sm_80", "FlashAttention-2", None),
        ({}, "sm_100a", "FlashAttention-2", None),
    ],
)
def test_the_algorithm_is_named_and_on_hopper_why_it_is_not_the_newest(
    fields: dict[str, Any], arch: str, algorithm: str, reason: str | None
) -> None:
    found = fg.explain(fg.AttentionSpec(**{"head_dim": 128} | fields), 256, arch=arch)
    assert found.algorithm == found.as_dict()["algorithm"] == algorithm
    assert f"\nkernel  {algorithm} for {arch}\n" in str(found)
    if reason is None:
        assert found.why_not_fa3 is None
        assert f"\nkernel  {algorithm} for {arch}\n        not FlashAttention-3" not in str(found)
    else:
        assert reason in found.as_dict()["why_not_fa3"]
        assert f"\n        not FlashAttention-3: {found.why_not_fa3}\n" in str(found)


EIGHT_BITS = {"dtype": "e4m3", "cache_dtype": "e4m3"}


@pytest.mark.parametrize(
    ("fields", "arch", "len_q", "role", "algorithm", "words"),
    [
        ({}, "sm_90a", 512, "prefill", "FlashAttention-3", ()),
        ({}, "sm_90a", 1, "decode", "Flash-Decoding", ()),
        ({}, "sm_80", 512, "forward", "FlashAttention-2", ()),
        (EIGHT_BITS, "sm_90a", 512, "prefill", "FlashAttention-3", ()),
        (EIGHT_BITS, "sm_90a", 8, "decode", "Flash-Decoding", ("not by wgmma and TMA: wgmma would read e4m3",)),
        (
            {"cache_dtype": "e4m3"},
            "sm_90a",
            512,
            "decode",
            "Flash-Decoding",
            (
                "not by wgmma and TMA",
                "prompts are not for FlashAttention-3: it multiplies queries and keys of one dtype",
            ),
        ),
    ],
)
def test_with_a_cache_it_explains_the_kernel_that_the_lengths_choose(
    fields: dict[str, Any], arch: str, len_q: int, role: str, algorithm: str, words: tuple[str, ...]
) -> None:
    spec = fg.AttentionSpec(128, direction="forward", cache="paged", **fields)
    found = fg.explain(spec, len_q, 4096, arch=arch)
    kernel = plan(spec, None, arch).kernel(role)
    assert found.forward_kernel == kernel
    assert (found.algorithm, found.why_not_fa3) == (algorithm, None)
    assert (found.tile_q, found.tile_kv) == (kernel.constant("tile_q"), kernel.constant("tile_kv"))
    assert ("kv_bytes" in found.as_dict()) == (role == "decode")
    text = " ".join(str(found).split())
    assert all(each in text for each in words)


@pytest.mark.parametrize(
    ("fields", "len_q", "expected"),
    [
        (
            {},
            512,
            {
                "if the assembler has too few registers for the kernel above": "forward",
                "with num_splits, with a left pad, or with pages of a size that is not a multiple of 8": "forward",
                "with batch_invariant": "decode",
                "for arguments that are aligned to 8 bytes": "forward",
            },
        ),
        (
            {},
            1,
            {
                "if the assembler has too few registers for the kernel above": "forward",
                "for arguments that are aligned to 8 bytes, for a left pad, and for pages of one key": "decode",
            },
        ),
        (
            EIGHT_BITS,
            512,
            {
                "if the assembler has too few registers for the kernel above": "decode",
                "with num_splits, with a left pad, or with pages of a size that is not a multiple of 8": "decode",
                "with batch_invariant": "decode",
                "for arguments that are aligned to 8 bytes": "decode",
            },
        ),
        (EIGHT_BITS, 1, {}),
    ],
)
def test_kernels_for_other_calls_with_a_cache_are_named(
    fields: dict[str, Any], len_q: int, expected: dict[str, str]
) -> None:
    spec = fg.AttentionSpec(128, direction="forward", cache="paged", **fields)
    found = fg.explain(spec, len_q, 4096, arch="sm_90a")
    assert {each.when: each.kernel.role for each in found.fallbacks} == expected
    assert not any(each.kernel.boxes for each in found.fallbacks if each.when != "with batch_invariant")


@pytest.mark.parametrize(
    ("fields", "arch", "algorithm", "reason"),
    [
        ({}, "sm_90a", "FlashAttention-3", None),
        ({"dropout": True}, "sm_90a", "FlashAttention-3", None),
        ({"dtype": "fp32"}, "sm_90a", "FlashAttention-2", "take fp16, bf16 and e4m3"),
        ({"deterministic": True}, "sm_90a", "FlashAttention-3", None),
        ({}, "sm_80", "FlashAttention-2", None),
        ({"direction": "forward"}, "sm_90a", "", None),
        # No backward kernel can be planned.
        ({"head_dim": 256, "dtype": "fp32"}, "sm_75", "", None),
    ],
)
def test_so_is_that_of_the_backward_pass(fields: dict[str, Any], arch: str, algorithm: str, reason: str | None) -> None:
    found = fg.explain(fg.AttentionSpec(**{"head_dim": 128} | fields), 256, arch=arch)
    assert found.backward_algorithm == found.as_dict()["backward_algorithm"] == algorithm
    assert (f"\n        backward: {algorithm}\n" in str(found)) == bool(algorithm)
    if reason is None:
        assert found.backward_why_not_fa3 is None
    else:
        assert reason in found.as_dict()["backward_why_not_fa3"]
        after = f"\n        backward: {algorithm}\n        not FlashAttention-3: {found.backward_why_not_fa3}\n"
        assert after in str(found)


@pytest.mark.parametrize(
    ("dim", "roles"), [(64, ["main"]), (128, ["main"]), (192, ["main", "query"]), (256, ["main", "query"])]
)
def test_the_resources_of_backward_kernels_are_shown_for_narrow_and_wide_heads(dim: int, roles: list[str]) -> None:
    found = fg.explain(fg.AttentionSpec(dim, mask=fg.causal()), 256, arch="sm_90a", width=100)
    assert [kernel["role"] for kernel in found.as_dict()["backward_kernels"]] == roles
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    for kernel in plan(found.spec, None, "sm_90a").kernels:
        if kernel.role in roles:
            section = text[text.index(f"\n{kernel.role:<8}") :]
            words = " ".join(section.split())
            assert all(line in words for line in choice_lines(kernel))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_forward_kernel_has_reasons(arch: str) -> None:
    found = fg.explain(fg.AttentionSpec(128, direction="forward"), 256, arch=arch)
    kernel = plan(found.spec, None, arch).kernel("forward")
    plain = found.as_dict()["forward_kernel"]
    assert (plain["role"], plain["reasons"]) == ("forward", list(kernel.reasons))
    text = str(found)
    words = " ".join(text[text.index("\nforward ") :].split())
    assert kernel.reasons
    assert all(line in words for line in choice_lines(kernel))


@pytest.mark.parametrize("dims", [(80, 80), (128, 64), (136, 104), (200, 8)])
def test_both_passes_pad_head_dims_on_hopper(dims: tuple[int, int]) -> None:
    found = fg.explain(fg.AttentionSpec(dims[0], head_dim_v=dims[1]), 256, arch="sm_90a")
    assert (found.why_not_fa3, found.backward_why_not_fa3) == (None, None)


def test_neither_pass_pads_head_dims_that_tma_cannot_read() -> None:
    found = fg.explain(fg.AttentionSpec(84), 256, arch="sm_90a")
    for reason in (found.why_not_fa3, found.backward_why_not_fa3):
        assert reason is not None
        assert "head dims must be multiples of 8" in reason


def test_a_schedule_that_is_asked_for_is_explained() -> None:
    spec = fg.AttentionSpec(128)
    found = fg.explain(spec, 256, arch="sm_90a", schedule=fg.Schedule(algorithm="fa2", tile_kv=32))
    assert found.why_not_fa3 == "its schedule says algorithm='fa2'"
    assert found.tile_kv == 32
    assert fg.explain(spec, 256, arch="sm_90a").tile_kv == plan(spec, None, "sm_90a").schedule.tile_kv


def test_a_mask_alone_has_no_kernel() -> None:
    found = fg.explain(fg.causal(), 256, arch="sm_90a")
    assert (found.algorithm, found.why_not_fa3) == ("", None)
    assert "kernel" not in str(found)


def test_a_large_map_is_drawn_small() -> None:
    lines = str(fg.explain(fg.causal(), 8192, 16384, tile=(64, 64), width=60)).split("\n")
    drawn = lines[lines.index("") + 1 :]
    assert "one character is 4 x 5 tiles" in drawn[0]
    assert len(drawn) == 2 + 32
    assert max(len(line) for line in drawn[1:]) <= 60
    assert drawn[1].split() == ["0", "5120", "10240"]
    assert drawn[2][8:].startswith("#" * 25 + "+")
    assert set(drawn[-1][8:]) == {"#", "+"}


def test_nothing_is_drawn_of_nothing() -> None:
    found = fg.explain(fg.causal(), 0, 10, tile=(64, 64))
    assert (found.tiles, found.flops, found.dense_flops) == (0, 0, 0)
    assert "0 skipped (0.0%)" in str(found)


def test_values_may_come_later() -> None:
    spec = fg.spec.AttentionSpec(64, mask=lambda b, h, q, k, ids=PACKED: ids[b, q] == ids[b, k])
    one = np.zeros((1, 128), np.int64)
    assert fg.explain(spec, 128, tile=(64, 64), captured={"ids": one}).full == 4


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((fg.causal(), -1), {}, "len_q=-1 is out of range"),
        ((fg.causal(), 2**24), {"tile": (64, 64)}, "give a larger tile=(256, 256)"),
        ((fg.causal(),), {"captured": {"ids": PACKED}}, "captured={'ids': ...} is not captured; this spec captured"),
        ((fg.document(PACKED),), {"captured": {"ids": Declared("int64", 2)}}, "ids has no value; pass captured="),
        ((fg.causal(),), {"tile": (0, 64)}, "tile queries=0 is out of range"),
    ],
)
def test_misuse_is_named(arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(fg.FlashgenError) as error:
        fg.explain(*arguments, **options)
    assert words in str(error.value)
