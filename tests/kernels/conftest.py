"""The count of drawn cases, which CI holds to what is promised."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: Each build's counts are added to this file as a line of JSON.
RECORD = "DRAWN_RECORD"


@pytest.fixture
def record() -> Callable[[dict[str, Any]], None]:
    """Notes what was done, if anybody asked for it."""

    def note(counts: dict[str, Any]) -> None:
        if RECORD in os.environ:
            # Workers append to one file: a line that is written at once stays whole.
            with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(counts) + "\n")

    return note
