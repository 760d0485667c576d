"""The model of the plan's kernels against bytes counted on the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from flashgen.plan.model.plans import Pass


@dataclass(frozen=True)
class Case:
    arch: str
    pass_: Pass
    spec: fg.AttentionSpec
    #: Queries, keys, heads of queries and of keys.
    sizes: tuple[int, int, int, int]


def _spec(head_dim: int = 64, **fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(head_dim, **{"dtype": "fp16", **fields})


def _per_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q % 64 < 8) | (k - q < h * 32)


CASES = {
    "Turing forward": Case("sm_75", "forward", _spec(), (200, 131, 4, 2)),
    "Turing backward": Case("sm_75", "backward", _spec(), (200, 131, 4, 2)),
    "Ampere causal forward": Case("sm_80", "forward", _spec(mask=fg.causal()), (333, 257, 4, 2)),
    "Ampere causal backward": Case("sm_80", "backward", _spec(mask=fg.causal()), (333, 257, 4, 2)),
    "Ampere deterministic": Case("sm_80", "backward", _spec(mask=fg.causal(), deterministic=True), (200, 257, 2, 1)),
    "dropout": Case("sm_80", "backward", _spec(dropout=True), (100, 90, 2, 1)),
    "odd head dims": Case("sm_80", "backward", _spec(33, head_dim_v=20, mask=fg.window(60, 30)), (150, 170, 2, 1)),
    "a mask by head in fp32": Case("sm_80", "backward", _spec(dtype="fp32", mask=_per_head), (150, 170, 2, 1)),
    "Hopper causal forward": Case("sm_90a", "forward", _spec(mask=fg.causal()), (333, 257, 4, 2)),
    "Hopper rows without keys": Case("sm_90a", "forward", _spec(128, mask=fg.causal()), (500, 100, 2, 1)),
    "Hopper causal backward": Case("sm_90a", "backward", _spec(mask=fg.causal()), (333, 257, 4, 2)),
    "Hopper full backward": Case("sm_90a", "backward", _spec(), (200, 300, 4, 2)),
    "Hopper deterministic": Case("sm_90a", "backward", _spec(mask=fg.causal(), deterministic=True), (333, 257, 2, 1)),
    "Hopper wide backward": Case("sm_90a", "backward", _spec(256), (200, 130, 2, 1)),
    # So many heads of one short tile that sums are cleared for others.
    "Hopper heads that take turns": Case("sm_90a", "backward", _spec(mask=fg.causal()), (16, 16, 600, 600)),
}


def _arrays(kernel: fg.lab.KernelIO) -> dict[str, Any]:
    """Bytes by array, without the counters and flags that the model leaves out."""
    return {
        "read": {name: size for name, size in kernel.reads.items() if name != "counters and flags"},
        "written": {name: size for name, size in kernel.writes.items() if name != "counters and flags"},
    }


@pytest.mark.parametrize("name", CASES)
def test_the_model_of_a_plan_is_what_its_kernels_move(name: str) -> None:
    case = CASES[name]
    len_q, len_kv, heads, heads_kv = case.sizes
    result = fg.lab.count_io(case.spec, len_q, len_kv, heads=heads, heads_kv=heads_kv, arch=case.arch, pass_=case.pass_)
    assert result.model.exact
    assert result.error < 0.05
    for model, counted in zip(result.model.kernels, result.counted.kernels, strict=True):
        assert model.name == counted.name
        assert _arrays(model) == _arrays(counted)


def test_a_count_shows_the_model_beside_it() -> None:
    text = str(fg.lab.count_io(_spec(mask=fg.causal()), 70))
    assert "read: model" in text
    assert "differ by 0.00 %" in text
    assert "<table>" in fg.lab.count_io(_spec(mask=fg.causal()), 70)._repr_html_()


def test_lengths_that_take_minutes_are_refused_with_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"count at most 16777216.*model larger ones"):
        fg.lab.count_io(_spec(), 2**20)
    with pytest.raises(ArgumentError, match=r"count at most 262144, such as one head of 512 x 512"):
        fg.lab.count_io(_spec(), 1024, schedule=fg.Schedule(algorithm="naive"))


def test_a_count_leaves_no_option_on_kernels_of_others() -> None:
    spec = _spec(mask=fg.causal())
    fg.lab.count_io(spec, 70)
    assert fg.build(spec, target="emulator").target.options == {}  # type: ignore[attr-defined]


def test_captured_tensors_are_refused() -> None:
    import numpy as np

    lengths = np.ones(2, np.int32)
    with pytest.raises(ArgumentError, match="captures tensors"):
        fg.lab.count_io(_spec(mask=lambda b, h, q, k: k < lengths[b]), 128)


def test_a_model_of_captured_tensors_claims_no_exactness() -> None:
    import numpy as np

    lengths = np.full(1, 64, np.int32)
    row = fg.lab.io_model(_spec(mask=lambda b, h, q, k: k < lengths[b]), 128)["plan"]
    assert not row.exact
    # Half of the keys are visited.
    assert row.kernels[0].reads["K"] == 64 * 64 * 2
