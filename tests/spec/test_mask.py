from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import SpecError
from flashgen.oracle import allowed_pairs
from flashgen.spec import Mask, causal, full, window
from flashgen.spec.masks.band import Band

limits = st.none() | st.integers(0, 12) | st.integers(2**31 - 2, 2**63 - 1)
aligns = st.sampled_from(["bottom-right", "top-left"])
windows = st.builds(window, limits, limits, align=aligns)
masks = st.builds(lambda a, b: a & b, windows, windows)
lengths = st.integers(0, 12)


def allowed_by_definition(mask, len_q, len_kv):
    """Each limit of each band, pair by pair."""
    allowed = np.ones((len_q, len_kv), bool)
    for i, j in np.ndindex(len_q, len_kv):
        for band, position in ((mask.bottom_right, i + len_kv - len_q), (mask.top_left, i)):
            if band.left is not None and j < position - band.left:
                allowed[i, j] = False
            if band.right is not None and j > position + band.right:
                allowed[i, j] = False
    return allowed


@given(masks, lengths, lengths)
def test_diagonals_select_the_pairs_of_the_definition(mask, len_q, len_kv):
    assert np.array_equal(allowed_pairs(mask, len_q, len_kv), allowed_by_definition(mask, len_q, len_kv))


@given(masks, masks, lengths, lengths)
def test_and_is_the_intersection(a, b, len_q, len_kv):
    both = allowed_pairs(a, len_q, len_kv) & allowed_pairs(b, len_q, len_kv)
    assert np.array_equal(allowed_pairs(a & b, len_q, len_kv), both)
    assert a & b == b & a
    assert a & a == a
    assert a & full() == a


@given(masks, st.integers(0, 2**31 - 2), st.integers(0, 2**31 - 2))
def test_diagonals_stay_within_what_can_occur(mask, len_q, len_kv):
    lower, upper = mask.diagonals(len_q, len_kv)
    assert -len_q <= lower <= len_kv
    assert -len_q - 1 <= upper <= len_kv


@given(masks, st.integers(1, 12))
def test_alignments_agree_on_equal_lengths(mask, length):
    swapped = Mask(bottom_right=mask.top_left, top_left=mask.bottom_right)
    assert mask.diagonals(length, length) == swapped.diagonals(length, length)


@given(masks)
def test_the_properties_are_those_of_the_bands(mask):
    assert mask.is_full == (mask == full())
    assert mask.is_full == (not mask.has_lower and not mask.has_upper)
    assert (mask.describe() == "full") == mask.is_full
    assert hash(mask) == hash(Mask(mask.bottom_right, mask.top_left))


def test_causal_masks_by_hand():
    assert allowed_pairs(causal(), 2, 4).astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert allowed_pairs(causal("top-left"), 2, 4).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert allowed_pairs(causal(), 3, 1).astype(int).tolist() == [[0], [0], [1]]
    assert allowed_pairs(window(1, 0), 3, 3).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_masks_describe_themselves():
    assert causal().describe() == "causal"
    assert causal(align="top-left").describe() == "causal(align=top-left)"
    assert window(512, 0).describe() == "window(left=512, right=0)"
    assert (causal() & window(3, align="top-left")).describe() == "causal & window(left=3, align=top-left)"


def test_minus_one_leaves_a_side_open_and_causal_is_a_window():
    assert window(-1, -1) == window() == full()
    assert window(-1, 0) == causal()


@pytest.mark.parametrize("value", [-2, 1.0, True, "1", 2**63, [1]])
def test_a_window_that_is_no_distance_is_refused(value):
    with pytest.raises(SpecError, match="window left=") as caught:
        window(value, value, align="middle")
    assert len(caught.value.violations) == 3
    with pytest.raises(SpecError, match="window right="):
        Band(right=value)
