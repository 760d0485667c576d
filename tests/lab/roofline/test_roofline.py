from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.arch import get_arch
from flashgen.lab.bench.case import Case
from flashgen.lab.bench.timings import Row, Timings, write_json
from flashgen.lab.page.measurements import read_roofline
from flashgen.lab.roofline.ceilings import Ceilings, Scale, measure_ceilings
from flashgen.lab.roofline.kernels import CeilingKernel
from flashgen.lab.roofline.measure import plans_of
from flashgen.lab.roofline.points import Measured, Work, point, points_of
from flashgen.lab.timing.device import HostDevice
from flashgen.lab.timing.rounds import Timing
from flashgen.plan import plan
from flashgen.spec import Schedule
from tests.lab.roofline.emulated import EmulatorLauncher

CEILINGS = Ceilings(copy_gbps=4000.0, matrix_tflops=800.0, exp_gops=4000.0)
CASE = Case("forward", "bf16", 64, False, 1024, 2, 4)


class Clocked:
    """Launches that do nothing, and take a millisecond each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.launched: list[str] = []

    def prepared(self, kernel: CeilingKernel, blocks: int, arrays: Sequence[Any], number: int) -> Callable[[], object]:
        def launch() -> None:
            self.launched.append(kernel.name)
            self.now += 1e-3

        return launch


def test_ceilings_are_amounts_over_times_of_interleaved_rounds() -> None:
    clocked = Clocked()
    device = HostDevice("a clock", lambda: clocked.now)
    found = measure_ceilings(device, clocked, get_arch("sm_90a"), 2, Scale(2**12, 10, 10))
    assert found.copy_gbps == pytest.approx(2 * 2**12 / 1e-3 / 1e9)
    assert found.matrix_tflops == pytest.approx(2 * 10 * 2 * 128 * 256 * 64 / 1e-3 / 1e12)
    assert found.exp_gops == pytest.approx(2 * 8 * 256 * 8 * 10 / 1e-3 / 1e9)
    # After a first launch of each, every round has all three.
    rounds = [set(clocked.launched[3:][i : i + 15]) for i in range(0, 75, 15)]
    assert rounds == [{"copy", "products_sm90", "exponentials"}] * 5


def test_the_probes_run_on_the_emulator() -> None:
    found = measure_ceilings(HostDevice("the emulator"), EmulatorLauncher(), get_arch("sm_80"), 1, Scale(2**10, 1, 1))
    assert min(found.copy_gbps, found.matrix_tflops, found.exp_gops) > 0


def test_traffic_is_arguments_and_results_and_what_the_plan_keeps() -> None:
    array = 2 * 2 * 1024 * 4 * 64
    rows = 4 * 2 * 1024 * 4
    fa2 = Work.of(CASE, plan(CASE.spec, Schedule(algorithm="fa2"), "sm_80"))
    assert fa2.bytes == 4 * array + rows
    assert fa2.exponentials == 2 * 4 * 1024**2
    assert fa2.intensity == pytest.approx(CASE.flops / (4 * array + rows))
    grid2d = Work.of(CASE, plan(CASE.spec, Schedule(algorithm="grid2d"), "sm_80"))
    kept = 4 * 2 * 4 * (1024 // 64) * 1024 * (64 + 2)
    assert grid2d.bytes == fa2.bytes + 2 * kept


def test_a_backward_pass_without_p_keeps_s_and_p_again() -> None:
    case = replace(CASE, pass_="backward")
    made = plan(case.spec, Schedule(algorithm="standard"), "sm_80")
    pairs, array, rows = 2 * 4 * 1024**2, 2 * 2 * 1024 * 4 * 64, 4 * 2 * 1024 * 4
    # S in float32, P and dS in 16 bits. Arguments are Q, K, V, O, dO and LSE, results dQ, dK and dV.
    assert Work.of(case, made).bytes == 8 * array + rows + 2 * (4 + 2 + 2) * pairs


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (Work(4e9, 1e9, 1e6), "copy"),
        (Work(1e6, 8e11, 1e6), "matrix"),
        (Work(1e6, 1e9, 4e9), "exp"),
    ],
)
def test_the_ceiling_that_needs_most_time_binds(work: Work, bound: str) -> None:
    found = point("fa3", work, 1.25, CEILINGS)
    assert found.bound == bound
    assert found.share == pytest.approx(0.8)
    assert found.sentence.startswith("fa3: ")
    assert found.sentence.endswith("bind it; at that ceiling alone it would take 80% of its time.")
    assert "no ceiling binds it; the nearest, " in point("naive", work, 100.0, CEILINGS).sentence


def test_the_json_and_the_table_hold_ceilings_and_kernels(tmp_path: Path) -> None:
    plans = plans_of(("fa2", "fa3"), (CASE,), None)
    # The emulator stands in for sm_80, where there is no fa3.
    assert [name for name, _ in plans] == ["fa2"]
    timings = Timings("A GPU", (Row("fa2", CASE, Timing(0.1, 0.0, 5), 0, False),))
    measured = Measured("A GPU", CEILINGS, points_of(timings, plans, CEILINGS))
    write_json(measured.as_dict(), tmp_path / "roofline.json")
    value = json.loads((tmp_path / "roofline.json").read_text())
    assert (value["schema"], value["device"]) == (1, "A GPU")
    assert value["ceilings"] == {"copy_gbps": 4000.0, "matrix_tflops": 800.0, "exp_gops": 4000.0}
    assert read_roofline(tmp_path / "roofline.json").kernels[0].bound == measured.points[0].bound
    (kernel,) = value["kernels"]
    assert {name: type(x) for name, x in kernel.items()} == {
        "name": str,
        "intensity": float,
        "tflops": float,
        "bound": str,
    }
    assert kernel["bound"] in ("copy", "matrix", "exp")
    text = str(measured)
    assert text.startswith("A GPU: copy 4000 GB/s, matrix products 800 TFLOP/s, exponentials 4000 billion/s\n")
    assert "fa2 forward, bf16, D=64, full, N=1024" in text


def test_a_roofline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flashgen.lab.roofline.plot import draw

    measured = Measured("A GPU", CEILINGS, (point("fa3", Work(1e6, 1e9, 4e9), 2.0, CEILINGS),))
    assert draw(measured, tmp_path / "roofline.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.gpu
def test_a_gpus_ceilings_are_of_the_right_size() -> None:
    from flashgen.lab.roofline.measure import measure_roofline

    measured = measure_roofline((CASE,), ("naive", "fa2"))
    ceilings = measured.ceilings
    assert 50 < ceilings.copy_gbps < 20_000
    assert 5 < ceilings.matrix_tflops < 5_000
    assert 100 < ceilings.exp_gops < 50_000
    assert {point.name.split()[0] for point in measured.points} == {"naive", "fa2"}
    assert all(0 < point.share <= 1 for point in measured.points), str(measured)
