from __future__ import annotations

import numpy as np
import pytest

from flashgen.dtypes import ALIASES, ARGUMENTS, CACHE_DTYPES, DTYPES


@pytest.mark.parametrize("name", [*DTYPES, *CACHE_DTYPES])
def test_the_row_is_what_numpy_says(name):
    row = ARGUMENTS[name]
    dtype = row.numpy()
    assert dtype.itemsize == row.bytes
    one = np.ones(1, dtype)
    step = np.nextafter(one, np.full(1, 2, dtype)).astype(np.float64) - 1.0
    assert row.epsilon == step.item() / 2
    assert row.is_half == (row.bytes == 2)


def test_every_alias_names_one_row_and_is_lower_case():
    assert len(ALIASES) == sum(len(row.aliases) for row in (*DTYPES.values(), *CACHE_DTYPES.values()))
    for alias, row in ALIASES.items():
        assert alias == alias.lower()
        assert alias in row.aliases
    assert all(ALIASES[name] is row for name, row in DTYPES.items())
