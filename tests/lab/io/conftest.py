"""Counts leave the kernels that they compile to the next run: compilation takes most of their time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache() -> None:
    """Instead of the empty cache of other tests of the laboratory."""
