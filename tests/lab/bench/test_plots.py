from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.lab.bench.case import Case
from flashgen.lab.bench.timings import Row, Timings
from flashgen.lab.timing.rounds import Timing


def test_plots_show_each_algorithm_over_lengths_and_over_head_dims(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashgen.lab.bench.plots import draw

    rows = tuple(
        Row(name, Case("forward", "bf16", d, True, n, 1, 4), Timing(n / 100, 0.0, 5), bytes_, name == "torch-flash")
        for d in (64, 128)
        for n in (512, 1024)
        for name, bytes_ in (("fa2", 2**20), ("torch-flash", 2**21), ("numpy", 0))
    )
    written = draw(Timings("A GPU", rows), tmp_path / "plots")
    assert [path.name for path in written] == [
        "forward-bf16-causal-d64.svg",
        "forward-bf16-causal-d128.svg",
        "forward-bf16-causal-head-dims.svg",
    ]
    assert all(path.read_text().rstrip().endswith("</svg>") for path in written)


def test_missing_matplotlib_is_a_sentence_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from flashgen.errors import FlashgenError
    from flashgen.lab.plotting import require_matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FlashgenError, match=r"matplotlib.*pip install 'flashgen\[lab\]'"):
        require_matplotlib()
