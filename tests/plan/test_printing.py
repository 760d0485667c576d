"""Plans as people read them."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan import plan
from flashgen.plan.model.plans import Problem


def test_a_plan_is_a_line_for_each_kernel() -> None:
    assert str(plan(fg.AttentionSpec(64, mask=fg.causal()), None, "sm_80")) == (
        "head_dim 64, bf16, causal, for sm_80 (A100)\n"
        "kernel                            tile      stages  warps  shared memory  grid (x, y, z)\n"
        "forward_d64_causal_sm80           128 x 64  2       4      49152 bytes    (ceil(Sq / 128), H, B)\n"
        "backward_prepare_d64_causal_sm80  -         -       8      -              (ceil(Sq / 128), H, B)\n"
        "backward_main_d64_causal_sm80     128 x 64  1       4      82944 bytes    (ceil(Sk / 64), Hk, B)\n"
        "backward_finish_d64_causal_sm80   128 x 64  1       4      16384 bytes    (ceil(Sq / 128), H, B)"
    )


SPECS = {
    "hopper": (fg.AttentionSpec(128, mask=fg.causal()), "sm_90a"),
    "wide": (fg.AttentionSpec(256), "sm_90a"),
    "cache": (fg.AttentionSpec(128, direction="forward", cache="paged"), "sm_80"),
    "packed": (fg.AttentionSpec(64, varlen=True), "sm_90a"),
    "bias": (
        fg.AttentionSpec(
            64, mask=fg.document(np.zeros((1, 8), np.int32)), score=fg.bias(np.zeros((1, 4, 8, 8), np.float32))
        ),
        "sm_80",
    ),
    "slopes": (fg.AttentionSpec(64, score=fg.alibi(np.ones(4, np.float32)), deterministic=True), "sm_86"),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_says_its_numbers_and_its_grid(name: str) -> None:
    spec, arch = SPECS[name]
    attention = plan(spec, None, arch)
    title, _, *lines = str(attention).splitlines()
    assert title.startswith(spec.describe())
    assert len(lines) == len(attention.kernels)
    sizes = {"Sq": 300, "Sk": 1000, "total_q": 300, "total_kv": 1000, "H": 6, "Hk": 3, "B": 2, "splits": 1}
    problem = Problem(batch=2, heads_q=6, heads_kv=3, len_q=300, len_kv=1000)
    for line, kernel in zip(lines, attention.kernels, strict=True):
        assert line.startswith(f"{kernel.name} ")
        assert f" {kernel.threads // 32} " in line
        assert (f"{kernel.smem.bytes} bytes" in line) == bool(kernel.smem.bytes)
        grid = line[line.index(" for ") + 5 : -len(" tiles")] if kernel.is_persistent else line[line.index("(") :]
        found = eval(grid, {"ceil": lambda x: -int(-x // 1), "max": max, **sizes})
        assert found == (kernel.grid(problem)[0] if kernel.is_persistent else kernel.grid(problem))
        assert str(kernel).startswith(f"{kernel.name}: ")
        assert "\n" not in str(kernel)


def test_clearing_gaps_covers_the_longer_of_the_packed_rows() -> None:
    kernel = plan(fg.AttentionSpec(64, varlen=True), None, "sm_80").kernel("clear_gaps")
    assert str(kernel).endswith("grid (ceil(max(total_q, total_kv) / 32), 1, 1)")
    assert kernel.grid(Problem(batch=1, heads_q=6, heads_kv=3, len_q=300, len_kv=1000)) == (32, 1, 1)


def test_repr_stays_exact() -> None:
    spec = fg.AttentionSpec(64)
    attention = plan(spec, None, "sm_80")
    assert repr(attention).startswith(f"AttentionPlan(spec={spec!r}, schedule=Schedule(")
    assert repr(attention.kernels[0]).startswith("KernelPlan(name='forward_d64_sm80', pass_='forward', ")
