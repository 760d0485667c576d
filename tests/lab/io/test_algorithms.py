"""The rows of flashgen's kernels of each algorithm against bytes counted on the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from flashgen.lab.io.names import OTHERS
from flashgen.lab.io.registry import KERNELS
from flashgen.plan.model.plans import Pass


@dataclass(frozen=True)
class Case:
    head_dim: int
    mask: fg.Mask
    #: Of calls that share kernels, which take longest to compile: queries, keys, heads of queries and of keys.
    sizes: tuple[tuple[int, int, int, int], ...]
    pass_: Pass = "forward"
    #: Each call's rows; one for all of them.
    rows: tuple[str, ...] = ()


FULL, CAUSAL = fg.full(), fg.causal()
#: FlashAttention-2 and 3 are counted as plans in test_count.py.
CASES = {
    "naive": Case(64, CAUSAL, ((17, 9, 2, 1), (9, 21, 1, 1)), rows=("naive",)),
    "naive wide": Case(128, FULL, ((7, 11, 2, 1),), rows=("naive",)),
    # The softmax kernel holds 4096 elements of a row, and reads the rest twice.
    "standard": Case(64, CAUSAL, ((150, 131, 4, 2), (131, 260, 1, 1), (2, 4203, 1, 1)), rows=("standard",)),
    "fa1": Case(64, FULL, ((150, 601, 2, 1), (301, 333, 1, 1)), rows=("fa1",)),
    "fa1 causal": Case(128, CAUSAL, ((301, 333, 2, 1), (333, 301, 1, 1)), rows=("fa1",)),
    # No query attends to the first tiles of keys.
    "fa1 window": Case(64, fg.window(20, 0), ((61, 700, 2, 1),), rows=("fa1",)),
    "grid1d": Case(128, CAUSAL, ((131, 150, 2, 1), (203, 131, 4, 2)), rows=("grid1d",)),
    "grid2d": Case(
        64,
        CAUSAL,
        ((90, 70, 1, 1), (150, 131, 4, 2), (203, 333, 2, 1)),
        rows=("grid2d", "grid2d_phased", "grid2d_phased"),
    ),
    "standard backward": Case(
        64, CAUSAL, ((150, 131, 4, 2), (131, 150, 2, 1)), "backward", rows=("standard", "standard_stored_p")
    ),
    "fa1 backward": Case(64, CAUSAL, ((150, 131, 4, 2), (301, 333, 1, 1)), "backward", rows=("fa1",)),
}


def test_every_row_of_kernels_has_a_case() -> None:
    assert {row for case in CASES.values() for row in case.rows} == set(KERNELS) - {"fa2", "fa3"}


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_kernels_is_what_they_move(name: str) -> None:
    case = CASES[name]
    spec = fg.AttentionSpec(case.head_dim, dtype="fp16", mask=case.mask)
    for number, (len_q, len_kv, heads, heads_kv) in enumerate(case.sizes):
        name = case.rows[number % len(case.rows)]
        kernel = KERNELS[name]
        call: dict[str, Any] = {"heads": heads, "heads_kv": heads_kv, "pass_": case.pass_}
        counting = {"schedule": fg.Schedule(algorithm=kernel.algorithm), "stored_p": kernel.stored_p}

        row = fg.lab.io_model(spec, len_q, len_kv, **call)[name]
        counted = fg.lab.count_io(spec, len_q, len_kv, **call, **counting)

        assert row.exact
        assert counted.error <= 0.05
        assert row.kernels == counted.model.kernels
        assert [_arrays(kernel) for kernel in row.kernels] == [_arrays(kernel) for kernel in counted.counted.kernels]


@pytest.mark.parametrize(("row", "arch"), [("fa2", "sm_80"), ("fa2", "sm_90a"), ("fa3", "sm_90a")])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_row_of_flash_attention_is_that_of_its_plan(row: str, arch: str, pass_: Pass) -> None:
    schedule = fg.Schedule(algorithm=KERNELS[row].algorithm)
    model = fg.lab.io_model(fg.AttentionSpec(128, mask=CAUSAL), 333, 301, arch=arch, schedule=schedule, pass_=pass_)
    assert model[row].kernels == model["plan"].kernels


def _arrays(kernel: fg.lab.KernelIO) -> tuple[str, dict[str, int], dict[str, int]]:
    """Bytes by array, without the counters and flags that the model leaves out."""
    reads, writes = (
        {name: size for name, size in side.items() if name != OTHERS} for side in (kernel.reads, kernel.writes)
    )
    return kernel.name, reads, writes


def test_a_plan_that_stores_no_p_takes_none() -> None:
    spec = fg.AttentionSpec(64, dtype="fp16")
    with pytest.raises(ArgumentError, match="stored_p=True is for the backward pass of a plan that stores P"):
        fg.lab.count_io(spec, 64, pass_="backward", stored_p=True)
    with pytest.raises(ArgumentError, match="use pass_='backward'"):
        fg.lab.count_io(spec, 64, schedule=fg.Schedule(algorithm="standard"), stored_p=True)
