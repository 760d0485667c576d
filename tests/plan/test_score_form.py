"""The plan decides how each kernel computes its score; rendering prints that form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan import plan
from flashgen.plan.model.expressions import ScoreForm
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import render

BIAS = fg.bias(np.zeros((64, 64), np.float16))


def planned(score: fg.Score, role: str, arch: str = "sm_90a") -> tuple[KernelPlan, ScoreForm]:
    kernel = plan(fg.AttentionSpec(64, score=score), None, arch).kernel(role)
    assert kernel.score is not None
    return kernel, kernel.score


def test_only_hoppers_forward_kernel_computes_scores_of_products() -> None:
    for role, arch in (("forward", "sm_90a"), ("main", "sm_90a"), ("forward", "sm_80")):
        kernel, form = planned(BIAS, role, arch)
        has_products = (role, arch) == ("forward", "sm_90a")
        assert (form.slope is None, form.has_spare_registers) == (has_products, has_products), kernel.name
        assert len(form.ahead) == (arch == "sm_90a"), kernel.name


@pytest.mark.parametrize("role", ["forward", "main"])
def test_rendering_fetches_ahead_what_the_plan_says(role: str) -> None:
    kernel, form = planned(BIAS, role)
    assert "row_of_" in render(kernel).text
    without = replace(kernel, score=replace(form, ahead=()), switches=kernel.switches - {"loads_ahead"})
    assert "row_of_" not in render(without).text


def test_only_spare_registers_keep_the_constants_of_a_tile() -> None:
    score = fg.Score.of(lambda s, b, h, q, k: 20.0 * fg.tanh(s * fg.exp(h * 0.125)) + s)
    kernel, form = planned(score, "forward")
    spared = replace(kernel, score=replace(form, has_spare_registers=False))
    assert "first.constant" in render(kernel).text
    assert "first.constant" not in render(spared).text
