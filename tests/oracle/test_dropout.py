from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.oracle import backward, dropout_mask, forward
from flashgen.oracle.dropout import philox

#: Counter, key and numbers, as the authors of Philox published them with their code.
KNOWN = (
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
SEEDED = fg.Dropout(0.3, 7, 2**34 + 4)


@pytest.mark.parametrize(("counter", "key", "numbers"), KNOWN)
def test_numbers_are_those_of_philox(counter: tuple[int, ...], key: int, numbers: tuple[int, ...]) -> None:
    drawn = philox([np.array([word], np.uint64) for word in counter], key)
    assert tuple(int(word[0]) for word in drawn) == numbers


@pytest.mark.parametrize("p", [0.0, 0.01, 0.25, 0.9, 1 - 1e-9])
def test_as_many_pairs_are_dropped_as_the_probability_says(p: float) -> None:
    kept = dropout_mask(fg.Dropout(p, 3), 2, 4, 160, 200)
    dropped = 1.0 - kept.mean()
    assert abs(dropped - p) <= 2.0**-16 + 4.0 * np.sqrt(p * (1 - p) / kept.size)


def test_a_pair_keeps_its_fate_whatever_the_sizes_of_the_call() -> None:
    large = dropout_mask(SEEDED, 2, 3, 70, 90)
    assert np.array_equal(dropout_mask(SEEDED, 1, 2, 33, 51), large[:1, :2, :33, :51])


@pytest.mark.parametrize(
    "other",
    [
        fg.Dropout(0.3, 8, 2**34 + 4),
        fg.Dropout(0.3, 7 + 2**32, 2**34 + 4),
        fg.Dropout(0.3, 7, 2**34 + 8),
        fg.Dropout(0.3, 7, 4),
    ],
    ids=["seed", "upper half of the seed", "offset", "upper half of the offset"],
)
def test_everything_that_says_which_pairs_are_dropped_matters(other: fg.Dropout) -> None:
    """Two patterns that have nothing to do with each other differ in 2 p (1 - p) of all pairs."""
    one, two = dropout_mask(SEEDED, 1, 1, 128, 128), dropout_mask(other, 1, 1, 128, 128)
    assert abs((one != two).mean() - 0.42) < 0.03


def test_no_two_queries_keys_heads_or_sequences_share_a_pattern() -> None:
    kept = dropout_mask(SEEDED, 2, 2, 64, 64).reshape(4, 64, 64)
    for patterns in (kept.reshape(4, -1), kept[0], kept[0].T, kept[:, :, 0], kept[:, 0]):
        assert len({row.tobytes() for row in patterns}) == len(patterns)


def test_the_state_stands_for_seed_and_offset() -> None:
    state = fg.Dropout(0.3, state=np.array([7, 2**34 + 4], np.int64))
    assert np.array_equal(dropout_mask(state, 1, 1, 40, 40), dropout_mask(SEEDED, 1, 1, 40, 40))


def test_what_is_kept_counts_more_and_the_log_sum_exp_knows_nothing_of_it() -> None:
    spec, plain = fg.AttentionSpec(8, dropout=True), fg.AttentionSpec(8)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 9, 2, 8)) for _ in range(3))
    o, lse = forward(spec, q, k, v, dropout=SEEDED)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
    p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    expected = np.einsum("bhqk,bkhd->bqhd", p * dropout_mask(SEEDED, 2, 2, 9, 9) / 0.7, v)
    np.testing.assert_allclose(o, expected, atol=1e-12)
    np.testing.assert_array_equal(lse, forward(plain, q, k, v)[1])


def test_gradients_are_those_of_the_forward_pass() -> None:
    spec = fg.AttentionSpec(4, head_dim_v=3, mask=fg.causal(), score=fg.softcap(2.0), dropout=True)
    random = np.random.default_rng(1)
    q, k = random.standard_normal((1, 5, 2, 4)), random.standard_normal((1, 6, 1, 4))
    v, do = random.standard_normal((1, 6, 1, 3)), random.standard_normal((1, 5, 2, 3))
    arrays, step = [q, k, v], 1e-6
    for array, gradient in zip(arrays, backward(spec, q, k, v, do, dropout=SEEDED), strict=True):
        for index in np.ndindex(array.shape):
            values = []
            for change in (step, -step):
                array[index] += change
                values.append((do * forward(spec, *arrays, dropout=SEEDED)[0]).sum())
                array[index] -= change
            assert abs((values[0] - values[1]) / (2 * step) - gradient[index]) < 1e-6


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: fg.Dropout(1.0), "p=1.0 is no probability"),
        (lambda: fg.Dropout(-0.1), "p=-0.1"),
        (lambda: fg.Dropout(float("nan")), "p=nan"),
        (lambda: fg.Dropout(True), "p=True"),
        (lambda: fg.Dropout(0.5, -1), "seed=-1 is out of range"),
        (lambda: fg.Dropout(0.5, 1, 2**64), "offset="),
        (lambda: fg.Dropout(0.5, 1, state=[1, 2]), "are in state too"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, complaint: str) -> None:
    with pytest.raises(fg.ArgumentError, match=complaint):
        make()  # type: ignore[operator]


def test_dropout_belongs_to_specs_that_have_it() -> None:
    x = np.ones((1, 2, 1, 4))
    with pytest.raises(fg.ArgumentError, match=r"needs flashgen\.Dropout"):
        forward(fg.AttentionSpec(4, dropout=True), x, x, x)
    with pytest.raises(fg.ArgumentError, match="the spec has none"):
        forward(fg.AttentionSpec(4), x, x, x, dropout=SEEDED)
