from __future__ import annotations

import dataclasses
from random import Random

import pytest

from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec, causal, full

FIELDS = (
    *("head_dim_v", "dtype", "mask", "direction", "deterministic", "dropout", "varlen", "page_scales", "qv"),
    *("cache", "cache_dtype", "out_dtype", "scale_block"),
)
HOSTILE = (
    *(
        None,
        True,
        False,
        0,
        0.0,
        -1,
        1,
        64,
        256,
        257,
        64.0,
        float("nan"),
        10**30,
        1j,
        "",
        "64",
        "bf16",
        "half",
        "FP32",
    ),
    *("forward", "both", "paged", [], [64], {}, {"left": 1}, (1, 2), object(), int, causal(), full(), b"bf16"),
)


def test_defaults():
    spec = AttentionSpec(64)
    assert (spec.head_dim, spec.head_dim_v, spec.dtype, spec.mask) == (64, 64, "bf16", full())
    assert (spec.direction, spec.deterministic, spec.needs_backward) == ("both", False, True)
    assert spec.default_scale == 0.125


def test_specs_are_frozen_equal_by_value_and_hashable():
    spec = AttentionSpec(64, mask=causal(), dtype="half")
    assert spec == AttentionSpec(64, head_dim_v=64, mask=causal(), dtype="float16")
    assert len({spec, AttentionSpec(64, mask=causal(), dtype="fp16"), AttentionSpec(64)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.head_dim = 1


def test_a_bad_spec_lists_every_violation_once():
    with pytest.raises(SpecError) as caught:
        AttentionSpec(
            0,
            head_dim_v=257,
            dtype="int8",
            mask="causal",
            direction="up",
            deterministic=1,
            dropout="0.1",
            varlen=None,
            page_scales=0,
            qv="yes",
            cache="rows",
            cache_dtype="int8",
            out_dtype="int8",
            scale_block=64,
        )
    names = [violation.split("=")[0] for violation in caught.value.violations]
    assert names == ["head_dim", *FIELDS]
    with pytest.raises(SpecError) as caught:
        AttentionSpec(300)
    assert caught.value.violations == ("head_dim=300 is out of range; use a whole number from 1 to 256",)


def test_a_cache_is_for_forward_passes_alone():
    with pytest.raises(SpecError) as caught:
        AttentionSpec(64, cache="paged", dropout=True, varlen=True)
    assert [violation.partition("; ")[2] for violation in caught.value.violations] == [
        "use direction='forward'",
        *["leave one of them out"] * 2,
    ]
    assert AttentionSpec(64, direction="forward", cache="paged").describe() == (
        "head_dim 64, bf16, full, forward only, paged cache"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache_dtype": "fp8"}, "cache_dtype='fp8' is unknown; use 'e4m3' or 'e5m2', or leave it out"),
        ({"cache_dtype": "e4m3", "cache": None}, "cache_dtype='e4m3' is the dtype of a cache; add cache='paged'"),
        (
            {"cache_dtype": "e4m3", "dtype": "fp32"},
            "cache_dtype='e4m3' needs queries of 16 or 8 bits; use dtype='bf16', 'fp16' or 'e4m3'",
        ),
        ({"cache_dtype": "e4m3", "head_dim_v": 30}, "head_dim_v=30 and cache_dtype='e4m3' need a multiple of 4"),
        (
            {"page_scales": True},
            "page_scales=True is for 8-bit keys in pages; add cache='paged' and cache_dtype='e4m3'",
        ),
        (
            {"page_scales": True, "cache": "contiguous", "cache_dtype": "e5m2"},
            "page_scales=True is for 8-bit keys in pages",
        ),
    ],
)
def test_an_8_bit_cache_that_cannot_be_is_refused(fields, words):
    with pytest.raises(SpecError, match=words):
        AttentionSpec(64, **{"direction": "forward", "cache": "paged", **fields})


def test_an_8_bit_cache_is_described():
    spec = AttentionSpec(64, direction="forward", cache="paged", cache_dtype="float8_e4m3fn", page_scales=True)
    assert spec.cache_dtype == "e4m3"
    assert spec.describe() == "head_dim 64, bf16, full, forward only, paged cache of e4m3, a scale for each page"


LATENT = {"head_dim_v": 512, "direction": "forward", "cache": "paged", "qv": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_dim_v": 576}, "head_dim_v=576 and qv=True do not go together; use a multiple of 64 up to 512"),
        ({"head_dim_v": 500}, "head_dim_v=500 and qv=True do not go together; use a multiple of 64 up to 512"),
        ({"head_dim": 128}, "head_dim=128 and qv=True do not go together; use a multiple of 16 up to 64"),
        ({"cache": None}, "qv=True is for a cache; add cache='paged' or cache='contiguous', and direction='forward'"),
        ({"cache_dtype": "e4m3"}, "cache_dtype='e4m3' and qv=True do not go together; use a 16-bit cache"),
        ({"dtype": "fp32"}, "dtype='fp32' and qv=True do not go together; use dtype='bf16' or 'fp16'"),
        ({"qv": 1}, "qv=1 is not a bool; use True or False"),
        ({"qv": False}, "head_dim_v=512 is out of range; use a whole number from 1 to 256"),
    ],
)
def test_values_that_are_keys_and_cannot_be_are_refused(fields, words):
    with pytest.raises(SpecError, match=words):
        AttentionSpec(**{"head_dim": 64, **LATENT, **fields})


def test_scores_of_values_that_are_keys_have_the_columns_of_both():
    spec = AttentionSpec(64, **LATENT)
    assert (spec.score_dim, spec.default_scale) == (576, 1 / 24)
    assert spec.describe() == "head_dim 64/512, bf16, full, forward only, paged cache, values as keys (qv)"
    plain = AttentionSpec(64, head_dim_v=128)
    assert (plain.score_dim, plain.default_scale) == (64, 1 / 8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"direction": "both"}, "dtype='e4m3' has no backward pass; use direction='forward'"),
        ({"dropout": True}, "dropout=True and dtype='e4m3' do not go together; leave one of them out"),
        (
            {"cache": "paged", "scale_block": 64},
            "scale_block=64 and cache='paged' do not go together; leave scale_block out, and give each page a scale",
        ),
        ({"cache": "paged", "head_dim": 30}, "head_dim=30 and cache_dtype='e4m3' need a multiple of 4; pad the heads"),
        ({"cache": "paged", "qv": True}, "dtype='e4m3' and qv=True do not go together; use dtype='bf16' or 'fp16'"),
        ({"head_dim_v": 40}, "head_dim_v=40 and dtype='e4m3' need a multiple of 16; pad the heads"),
        ({"out_dtype": "fp32"}, "out_dtype='fp32' is unknown; use 'bf16' or 'fp16'"),
        ({"scale_block": 32}, "scale_block=32 is not supported; use 64 or 128, or None for scales of whole heads"),
        ({"scale_block": 64.0}, "scale_block=64.0 is not supported; use 64 or 128"),
        ({"dtype": "bf16", "scale_block": 64}, "scale_block=64 is for dtype='e4m3'; leave it out"),
        ({"dtype": "fp16", "out_dtype": "fp16"}, "out_dtype='fp16' is for dtype='e4m3'; leave it out"),
        ({"dtype": "e5m2"}, "dtype='e5m2' is unknown; use one of fp16, bf16, fp32, e4m3"),
    ],
)
def test_8_bit_inputs_that_cannot_be_are_refused(fields, words):
    with pytest.raises(SpecError, match=words):
        AttentionSpec(**{"head_dim": 64, "dtype": "e4m3", "direction": "forward", **fields})


def test_8_bit_inputs_are_described():
    spec = AttentionSpec(64, dtype="float8_e4m3fn", direction="forward", scale_block=128)
    assert (spec.dtype, spec.out_dtype, spec.out_element.name) == ("e4m3", "bf16", "bf16")
    assert spec.describe() == "head_dim 64, e4m3 to bf16, full, forward only, a scale for each 128 rows"
    assert spec == AttentionSpec(64, dtype="e4m3", direction="forward", scale_block=128, out_dtype="bfloat16")
    cached = AttentionSpec(36, dtype="e4m3", direction="forward", cache="paged")
    assert cached.describe() == "head_dim 36, e4m3 to bf16, full, forward only, paged cache of e4m3"
    assert (spec.multiplies_eight_bits, cached.multiplies_eight_bits) == (True, False)


def test_anything_else_is_a_spec_or_a_spec_error():
    random = Random(0)
    accepted = 0
    for _ in range(10_000):
        fields = {name: random.choice(HOSTILE) for name in FIELDS if random.random() < 2 / len(FIELDS)}
        try:
            spec = AttentionSpec(random.choice(HOSTILE), **fields)
        except SpecError as error:
            remedies = [violation.partition("; ")[2] for violation in error.violations]
        else:
            remedies = ["none needed"]
            accepted += 1
            assert type(spec.head_dim) is type(spec.head_dim_v) is int
        assert remedies
        assert all(remedies), fields
    assert accepted > 100


def test_specs_describe_themselves():
    spec = AttentionSpec(192, head_dim_v=128, mask=causal(), direction="forward", deterministic=True)
    assert spec.describe() == "head_dim 192/128, bf16, causal, forward only, deterministic"
