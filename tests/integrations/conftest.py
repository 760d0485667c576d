"""Where models of other libraries run: on a GPU, or tiny ones on the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    from flashgen.torch import emulate_cpu

    with emulate_cpu():
        yield request.param
