"""The model of the decode kernel beside what the emulator counts."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen.lab.io.decode import split_of
from flashgen.lab.io.model import sizes_of
from flashgen.plan import plan

HOLES = fg.Mask.of(lambda b, h, q, k: (k // 128) % 2 == 0)
#: Cache, mask, new tokens, keys, sequences, heads, and heads of keys.
CALLS: dict[str, tuple[Any, ...]] = {
    "one token": ("paged", fg.causal(), 1, 1000, 2, 8, 2),
    "guesses": ("contiguous", fg.full(), 4, 700, 1, 8, 1),
    "a window": ("paged", fg.window(150, 0), 3, 900, 2, 4, 2),
    "many rows": ("contiguous", fg.causal(), 16, 300, 3, 16, 2),
    "one block": ("paged", fg.causal(), 1, 40, 1, 1, 1),
    "holes": ("contiguous", HOLES, 1, 640, 1, 2, 2),
}


def spec_of(cache: Any, mask: fg.Mask, **fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(64, **{"dtype": "fp16", **fields}, mask=mask, direction="forward", cache=cache)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_model_is_what_the_emulator_counts(call: tuple[Any, ...]) -> None:
    cache, mask, len_q, len_kv, batch, heads, heads_kv = call
    found = fg.lab.count_io(
        spec_of(cache, mask, head_dim_v=80), len_q, len_kv, batch=batch, heads=heads, heads_kv=heads_kv
    )
    (counted,), (model,) = found.counted.kernels, found.model.kernels
    assert counted.name == model.name == "decode"
    for side, own in ((counted.reads, model.reads), (counted.writes, model.writes)):
        assert {name: count for name, count in side.items() if name != "counters and flags"} == own
    assert found.error < 0.06


#: New tokens, keys, sequences and heads: one tile of rows, a team of two, and two rounds of three.
LATENT = {"a tile": (1, 500, 2, 40), "a team": (1, 700, 2, 128), "rounds": (5, 300, 1, 64)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("call", LATENT.values(), ids=LATENT)
def test_latent_vectors_are_counted_once_for_64_rows(call: tuple[int, ...], arch: str) -> None:
    len_q, len_kv, batch, heads = call
    spec = fg.AttentionSpec(32, head_dim_v=128, dtype="fp16", direction="forward", cache="paged", qv=True)
    found = fg.lab.count_io(spec, len_q, len_kv, batch=batch, heads=heads, heads_kv=1, arch=arch)
    (counted,), (model,) = found.counted.kernels, found.model.kernels
    for side, own in ((counted.reads, model.reads), (counted.writes, model.writes)):
        assert {name: count for name, count in side.items() if name != "counters and flags"} == own
    # TMA copies whole tiles of 64 keys.
    keys = len_kv if arch == "sm_80" else -(-len_kv // 64) * 64
    assert model.reads["V"] == -(-len_q * heads // 64) * batch * keys * 128 * 2


@pytest.mark.parametrize("len_q", [1, 100])
@pytest.mark.parametrize(
    "fields", [{"cache_dtype": "e4m3"}, {"cache_dtype": "e5m2", "page_scales": True}, {"dtype": "e4m3"}], ids=str
)
def test_8_bit_keys_are_counted_as_such(len_q: int, fields: dict[str, Any]) -> None:
    spec = spec_of("paged", fg.causal(), **fields)
    found = fg.lab.count_io(spec, len_q, 500, heads=4, heads_kv=2)
    (counted,), (model,) = found.counted.kernels, found.model.kernels
    assert counted.name == model.name == "decode"
    for side, own in ((counted.reads, model.reads), (counted.writes, model.writes)):
        assert {name: count for name, count in side.items() if name != "counters and flags"} == own
    wide = fg.lab.io_model(spec_of("paged", fg.causal()), 1, 500, heads=4, heads_kv=2)["plan"].kernels[0]
    row_tiles = -(-len_q * 2 // 64)
    assert 2 * model.reads["K"] == 2 * counted.reads["K"] == row_tiles * wide.reads["K"]


def test_keys_and_values_move_once_for_all_heads_that_share_them() -> None:
    spec = spec_of("paged", fg.causal())
    model = fg.lab.io_model(spec, 1, 4096, batch=8, heads=32, heads_kv=8)
    (kernel,) = model["plan"].kernels
    assert kernel.reads["K"] == kernel.reads["V"] == 8 * 8 * 4096 * 64 * 2
    assert model["fa2"].kernels[0].reads["K"] == 4 * kernel.reads["K"]
    assert "4096 tiles of keys (64 x 64) are shared out to" in model["plan"].assumptions


def test_more_multiprocessors_make_more_parts() -> None:
    spec = spec_of("paged", fg.causal())
    splits = []
    for multiprocessors in (1, 20, 10**6):
        sizes = sizes_of(spec, 1, 4096, 1, 8, 2, None, "sm_80", "forward", multiprocessors)
        splits.append(split_of(sizes, plan(spec, None, "sm_80").kernel("decode")))
    assert [split.blocks for split in splits] == [3, 60, 67]
    assert [split.parts for split in splits] == [4, 58, 65]
    # Blocks also share the three tiles that an item counts more than its eight, so that some get two and some none.
    few = sizes_of(spec, 1, 500, 1, 8, 2, None, "sm_80", "forward")
    assert (
        "shared out to 16 blocks, 2 to each at most"
        in split_of(few, plan(spec, None, "sm_80").kernel("decode")).describe()
    )
    alone = sizes_of(spec, 1, 64, 1, 8, 2, None, "sm_80", "forward")
    assert split_of(alone, plan(spec, None, "sm_80").kernel("decode")).shared_parts == 0


def test_calls_of_other_kernels_are_modelled_and_not_counted() -> None:
    spec = spec_of("paged", fg.causal())
    for arch, role in (("sm_80", "forward"), ("sm_90a", "prefill")):
        assert fg.lab.io_model(spec, 100, 500, arch=arch)["plan"].kernels[0].name == role
    eight_bits = spec_of("paged", fg.causal(), dtype="e4m3")
    assert fg.lab.io_model(eight_bits, 100, 500, arch="sm_90a")["plan"].kernels[0].name == "prefill"
    assert fg.lab.io_model(spec_of("paged", fg.causal(), dtype="fp32"), 1, 500)["plan"].kernels[0].name == "forward"
    with pytest.raises(fg.ArgumentError, match="is counted for calls of the decode kernel alone"):
        fg.lab.count_io(spec, 100, 500)
    with pytest.raises(fg.ArgumentError, match="multiprocessors=0 is out of range"):
        fg.lab.io_model(spec, 1, 500, multiprocessors=0)


@pytest.mark.parametrize("len_kv", [100, 700, 32768, 2**20])
@pytest.mark.parametrize("fields", [{}, {"head_dim_v": 512, "qv": True}], ids=["16 bits", "latent"])
def test_explain_splits_a_sequence_as_the_kernel_does_with_enough_multiprocessors(
    fields: dict[str, Any], len_kv: int
) -> None:
    spec = spec_of("paged", fg.causal(), **fields)
    kernel = plan(spec, None, "sm_90a").kernel("decode")
    sizes = sizes_of(spec, 1, len_kv, 1, 1, 1, None, "sm_90a", "forward", 10**6)
    explained = fg.explain(spec, 1, len_kv, arch="sm_90a", decode=True).as_dict()
    assert explained["most_blocks"] == split_of(sizes, kernel).blocks
