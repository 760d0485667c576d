"""torch's ring attention, over operators that flashgen overrides, in four processes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
if torch and not (torch.distributed.is_available() and hasattr(torch.nn.attention, "restore_flash_attention_impl")):
    pytest.skip(
        f"torch {torch.__version__} lacks torch.distributed or torch.nn.attention.restore_flash_attention_impl, "
        "without which nobody can override the attention of a ring; install a newer torch",
        allow_module_level=True,
    )


def test_four_ranks_agree_with_the_whole(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ring_ranks.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "rendezvous"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        place, _, numbers = line.partition(": ")
        forward, backward, error = numbers.split()
        found[place] = int(forward), int(backward)
        assert float(error) < 2e-5, line
    # Unbalanced, a rank attends to the keys of those before it; balanced, every rank has something of each to do.
    assert found == {
        **{f"{rank} full": (4, 4) for rank in range(4)},
        **{f"{rank} causal": (rank + 1, rank + 1) for rank in range(4)},
        **{f"{rank} causal balanced": (4, 4) for rank in range(4)},
    }
