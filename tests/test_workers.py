"""Workers of one test run share the machine's GPUs."""

from __future__ import annotations

import pytest

from tests import conftest


@pytest.mark.parametrize(
    ("visible", "count", "found"),
    [
        (None, 2, ["0,1", "1,0", "0,1"]),
        (None, 3, ["0,1,2", "1,2,0", "2,0,1"]),
        ("5,3", 2, ["5,3", "3,5", "5,3"]),
        # The driver stops at the first that is not there.
        ("0,1,7,2", 2, ["0,1", "1,0", "0,1"]),
    ],
)
def test_each_worker_begins_with_another_gpu_and_sees_all(
    visible: str | None, count: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "gpu_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [conftest.gpus_for(f"gw{number}") for number in range(3)] == found
