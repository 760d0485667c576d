"""setmaxnreg: registers move between warpgroups, within the register file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

SCHEDULES = ["sequential", "reverse", "random", "priority"]


def finding(run: Any, body: str, threads: int = 384, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(f"const int group = thread_idx() / 128;\n#line 1\n{body}", threads=threads, **options)
    return str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("groups", "few", "many"), [(3, 24, 240), (3, 40, 232), (4, 32, 160), (2, 56, 256)])
def test_a_producer_gives_its_registers_to_the_consumers(
    run: Any, schedule: str, groups: int, few: int, many: int
) -> None:
    out = np.zeros(128 * groups, np.uint32)
    body = f"""if (thread_idx() < 128) setmaxnreg_dec<{few}>(); else setmaxnreg_inc<{many}>();
    out[thread_idx()] = 1;"""
    run(body, threads=128 * groups, schedule=schedule, out=out)
    assert (out == 1).all()


def test_an_increase_waits_until_enough_is_given_up(run: Any) -> None:
    # Without the wait the consumers would count before the producer does.
    out = np.zeros(384, np.uint32)
    body = """const int t = thread_idx();
    if (t < 128) {
      for (int i = 0; i < 5; ++i) warp_sync();
      reduce_add(count, 1.0f);
      setmaxnreg_dec<24>();
    } else {
      setmaxnreg_inc<240>();
      out[t] = count[0];
    }"""
    run(body, threads=384, schedule="reverse", out=out, count=np.zeros(1, np.float32))
    assert (out[128:] >= 32).all()


def test_more_than_the_register_file_holds_is_a_deadlock(run: Any) -> None:
    text = finding(run, "if (group == 0) setmaxnreg_dec<32>();\nelse setmaxnreg_inc<240>();")
    assert text.startswith("deadlock: no thread can run:")
    assert (
        "test.cu:2, setmaxnreg_inc<240> (its warp needs 2304 more registers, and the block has 1280 free ones)" in text
    )


def test_nobody_giving_anything_up_is_a_deadlock(run: Any) -> None:
    text = finding(run, "if (group != 0) setmaxnreg_inc<240>();")
    assert "needs 2304 more registers, and the block has 0 free ones" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "setmaxnreg_dec<23>();",
            "invalid operand: setmaxnreg of 23 registers; it takes a multiple of 8 from 24 to 256",
        ),
        ("setmaxnreg_dec<16>();", "invalid operand: setmaxnreg of 16 registers"),
        ("setmaxnreg_inc<264>();", "invalid operand: setmaxnreg of 264 registers"),
        ("setmaxnreg_dec<100>();", "invalid operand: setmaxnreg of 100 registers"),
        ("setmaxnreg_dec<240>();", "invalid operand: setmaxnreg_dec<240> of a warp whose threads have 168 registers"),
        ("setmaxnreg_inc<24>();", "invalid operand: setmaxnreg_inc<24> of a warp whose threads have 168 registers"),
    ],
)
def test_counts_that_are_not_legal_are_findings(run: Any, call: str, message: str) -> None:
    text = finding(run, f"\n{call}")
    assert text.startswith(message)
    assert "test.cu:2" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "body",
    [
        "if (thread_idx() < 96) setmaxnreg_dec<24>();",
        "if (thread_idx() >= 32 && thread_idx() < 128) setmaxnreg_dec<24>();",
        "if (thread_idx() < 64) setmaxnreg_dec<24>(); else if (group == 0) setmaxnreg_dec<32>();",
    ],
)
def test_all_warps_of_a_warpgroup_must_call_the_same(run: Any, schedule: str, body: str) -> None:
    assert finding(run, body, schedule=schedule).startswith("divergent warpgroup: ")


def test_lanes_of_a_warp_must_call_together(run: Any) -> None:
    assert finding(run, "if (thread_idx() % 32 < 7) setmaxnreg_dec<24>();").startswith("divergent collective: ")


def test_half_a_warpgroup_has_no_registers_to_give(run: Any) -> None:
    text = finding(run, "setmaxnreg_dec<24>();", threads=64)
    assert text.startswith("divergent warpgroup: setmaxnreg needs four warps")
