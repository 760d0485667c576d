"""Any spec, schedule, shape, layout and value: what the kernels give is as near to the oracle as it must be.

The emulator runs the kernels. Cases are the same in every run, unless ``HYPOTHESIS_PROFILE=explore`` asks for
new ones, and more of them. A compiler run costs as much as many launches: each spec is tried on several calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import flashgen as fg
from flashgen.plan import plan

EXPLORE = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
Judge = Callable[..., None]
LAYOUTS = (
    "contiguous",
    "contiguous",
    "heads first",
    "wide rows",
    "unaligned",
    "reversed",
    "one batch",
    "one head",
)
FILLS = ("normal", "normal", "large", "huge", "flat", "sparse")


def profile(examples: int) -> settings:
    return settings(
        max_examples=examples * (10 if EXPLORE else 1),
        derandomize=not EXPLORE,
        deadline=None,
        database=None,
        # Shrinking a failure takes minutes of compiling: only on request.
        phases=list(Phase) if EXPLORE else (Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Build:
    """What is compiled."""

    spec: fg.AttentionSpec
    schedule: fg.Schedule | None
    arch: str

    @property
    def kernel(self) -> fg.Kernel:
        return fg.build(self.spec, self.schedule, arch=self.arch, target="emulator")


@dataclass(frozen=True)
class Call:
    """Sizes, layouts (of q, k, v and do) and values of one call."""

    batch: int
    len_q: int
    len_kv: int
    heads_kv: int
    group: int
    layouts: tuple[str, str, str, str]
    fill: str
    scale: float | None
    seed: int

    def inputs(self, spec: fg.AttentionSpec) -> list[NDArray[Any]]:
        random = np.random.default_rng(self.seed)
        heads = self.heads_kv * self.group
        shapes = (
            (self.batch, self.len_q, heads, spec.head_dim),
            (self.batch, self.len_kv, self.heads_kv, spec.head_dim),
            (self.batch, self.len_kv, self.heads_kv, spec.head_dim_v),
            (self.batch, self.len_q, heads, spec.head_dim_v),
        )
        scale = spec.default_scale if self.scale is None else self.scale
        return [
            laid_out(values(shape, fill_of(name, self.fill), scale, random), layout, spec)
            for name, shape, layout in zip(("q", "k", "v", "do"), shapes, self.layouts, strict=True)
        ]


def fill_of(name: str, fill: str) -> str:
    return fill if name in ("q", "k") or fill in ("flat", "sparse") else "normal"


def values(shape: tuple[int, ...], fill: str, scale: float, random: np.random.Generator) -> NDArray[np.float64]:
    x = random.standard_normal(shape)
    if fill == "large":  # a row's largest logits stand far above the others
        x *= 6.0
    elif fill == "huge":  # logits of +-1e6, apart by small whole numbers times the scale, which every dtype holds
        x = np.rint(np.clip(x, -2, 2))
        exponent = int(np.log2(min(1e6 / scale, 2.0**23))) // 2
        x[..., 0] = 2.0**exponent * random.choice([-1.0, 1.0], shape[:-1])
    elif fill == "flat":  # every key is as good as any other
        x[...] = 0.5
    elif fill == "sparse":
        x *= random.random(shape) < 0.1
    return x


def laid_out(x: NDArray[np.float64], layout: str, spec: fg.AttentionSpec) -> NDArray[Any]:
    """The values in an array of that layout; all that lies around them is NaN."""
    batch, length, heads, dim = x.shape
    dtype = spec.element.numpy()

    def poisoned(*shape: int) -> NDArray[Any]:
        return np.full(shape, np.nan, dtype)

    if layout == "heads first":
        view = poisoned(batch, heads, length, dim).transpose(0, 2, 1, 3)
    elif layout == "wide rows":
        view = poisoned(batch, length + 2, heads, dim + 16)[:, 1 : length + 1, :, :dim]
    elif layout == "unaligned":
        view = poisoned(batch, length, heads, dim + 2)[..., 1 : dim + 1]
    elif layout == "reversed":
        view = poisoned(batch, length, heads, dim)[:, ::-1]
    elif layout == "one batch":
        view = np.broadcast_to(poisoned(min(batch, 1), length, heads, dim), x.shape)
    elif layout == "one head":
        view = np.broadcast_to(poisoned(batch, length, min(heads, 1), dim), x.shape)
    else:
        view = poisoned(batch, length, heads, dim)
    if not view.flags.writeable:
        view.flags.writeable = True  # a broadcast view: the last values written count for all
    view[...] = x.astype(dtype)
    return view


dims = st.one_of(st.integers(1, 48), st.sampled_from([16, 32, 64, 64, 72, 96, 128]), st.integers(1, 256))
distances = st.one_of(st.none(), st.integers(0, 40))
alignments = st.sampled_from(["bottom-right", "top-left"])
windows = st.builds(lambda left, right, align: fg.window(left, right, align=align), distances, distances, alignments)
masks = st.one_of(
    st.just(fg.full()),
    st.builds(fg.causal, alignments),
    windows,
    st.builds(lambda one, other: one & other, st.builds(fg.causal, alignments), windows),
)


@st.composite
def forward_fields(draw: Any) -> dict[str, Any]:
    """Tiles in which every warp has its share; fields may be left to the plan."""
    kind, count = draw(st.sampled_from(["split_q", "split_q", "split_k"])), draw(st.sampled_from([1, 2, 4]))
    rows, keys = draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32, 48, 64]))
    fields = {
        "tile_q": rows * (count if kind == "split_q" else 1),
        "tile_kv": keys * (count if kind == "split_k" else 1),
        "stages": draw(st.sampled_from([1, 2, 3])),
    }
    left_out = draw(st.sampled_from(["", "", *fields]))
    fields.pop(left_out, None)
    return {**fields, "warps": fg.WarpPartition(kind, count)}


backward_fields = st.builds(
    fg.BackwardSchedule,
    tile_q=st.sampled_from([None, 16, 32, 64, 96]),
    tile_kv=st.sampled_from([None, 16, 32, 64, 80, 128]),
    stages=st.sampled_from([None, 1, 2]),
    warps=st.sampled_from([None, 1, 2, 4, 8]),
)


@st.composite
def builds(draw: Any, arch: str, dtype: str, masks: Any = masks) -> Build:
    """A spec with a schedule that can be planned: where one cannot, the plan chooses more of it."""
    dim = draw(dims)
    spec = fg.AttentionSpec(
        dim,
        head_dim_v=draw(st.one_of(st.just(dim), dims)),
        dtype=dtype,
        mask=draw(masks),
        deterministic=draw(st.booleans()),
    )
    assume(can_be_planned(spec, None, arch))
    schedule = fg.Schedule(**draw(forward_fields()), backward=draw(backward_fields))
    one_stage = replace(schedule, stages=None, backward=replace(schedule.backward, stages=None))
    default = fg.BackwardSchedule()
    wishes = [schedule, one_stage, replace(schedule, backward=default), replace(one_stage, backward=default)]
    wishes += [fg.Schedule(backward=one_stage.backward), None]
    wish = next(wish for wish in wishes[draw(st.sampled_from([0, 0, 0, 5])) :] if can_be_planned(spec, wish, arch))
    return Build(spec, wish, arch)


def can_be_planned(spec: fg.AttentionSpec, schedule: fg.Schedule | None, arch: str) -> bool:
    try:
        plan(spec, schedule, arch)
    except fg.PlanError:
        return False
    return True


@st.composite
def calls(draw: Any, build: Build) -> Call:
    made = plan(build.spec, build.schedule, build.arch).schedule
    tile_q, tile_kv = made.tile_q or 64, made.tile_kv or 64
    edges_q = st.sampled_from([0, 1, tile_q - 1, tile_q, tile_q + 1, made.backward.tile_q or 64])
    edges_kv = st.sampled_from([0, 1, tile_kv - 1, tile_kv, tile_kv + 1, 3 * tile_kv + 5])
    len_q = draw(st.one_of(st.integers(1, 70), edges_q))
    # Diagonals that pass near the corners of the warps' blocks are where masks go wrong.
    near_corners = st.builds(
        lambda blocks, off: max(len_q + 16 * blocks + off, 0), st.integers(0, 3), st.integers(-2, 2)
    )
    len_kv = draw(st.one_of(st.integers(1, 90), edges_kv, near_corners))
    layout = st.sampled_from(LAYOUTS)
    return Call(
        batch=draw(st.sampled_from([*(1, 2) * 5, 0])),
        len_q=min(len_q, 200),
        len_kv=min(len_kv, 200),
        heads_kv=draw(st.sampled_from([*(1, 2) * 5, 0])),
        group=draw(st.sampled_from([1, 2, 3])),
        layouts=(draw(layout), draw(layout), draw(layout), draw(layout)),
        fill=draw(st.sampled_from(FILLS)),
        scale=draw(st.sampled_from([None, None, 1.0, 0.01])),
        seed=draw(st.integers(0, 2**16)),
    )


GROUPS = {
    f"{arch} {dtype}": (arch, dtype)
    for arch, dtype in (
        ("sm_75", "fp16"),
        ("sm_75", "fp32"),
        ("sm_80", "fp16"),
        ("sm_80", "bf16"),
        ("sm_80", "fp32"),
        ("sm_90", "bf16"),
    )
}


@pytest.mark.parametrize("group", GROUPS)
@profile(6)
@given(data=st.data())
def test_every_result_is_within_its_bound(group: str, data: st.DataObject, judge: Judge) -> None:
    build = data.draw(builds(*GROUPS[group]))
    for call in data.draw(st.lists(calls(build), min_size=1, max_size=8)):
        note(f"now {call}")
        judge(build.kernel, call.inputs(build.spec), call.scale)


limited = masks.filter(lambda mask: not mask.is_full)


def spoil(data: st.DataObject, arrays: list[NDArray[Any]], bad: tuple[float, ...]) -> None:
    """Puts values that are not finite into a few elements of some of the arrays."""
    for _ in range(data.draw(st.integers(0, 2))):
        x = data.draw(st.sampled_from(arrays))
        if x.size:
            place = tuple(data.draw(st.integers(0, size - 1)) for size in x.shape)
            x[place] = data.draw(st.sampled_from(bad))


@pytest.mark.parametrize("group", ["sm_75 fp16", "sm_80 bf16", "sm_80 fp32"])
@profile(3)
@given(data=st.data())
def test_what_is_not_finite_in_a_key_reaches_only_those_who_attend_to_it(
    group: str, data: st.DataObject, judge: Judge
) -> None:
    build = data.draw(builds(*GROUPS[group], masks=limited))
    for call in data.draw(st.lists(calls(build), min_size=1, max_size=8)):
        note(f"now {call}")
        inputs = call.inputs(build.spec)
        spoil(data, inputs[1:2], (np.nan,))
        spoil(data, inputs[2:3], (np.nan, np.inf, -np.inf))
        judge(build.kernel, inputs, call.scale)


@pytest.mark.parametrize("group", ["sm_75 fp16", "sm_80 bf16", "sm_80 fp32"])
@profile(3)
@given(data=st.data())
def test_nan_in_a_query_reaches_no_other_query(group: str, data: st.DataObject, judge: Judge) -> None:
    build = data.draw(builds(*GROUPS[group], masks=limited))
    for call in data.draw(st.lists(calls(build), min_size=1, max_size=8)):
        note(f"now {call}")
        inputs = call.inputs(build.spec)
        spoil(data, [inputs[0], inputs[3]], (np.nan,))
        judge(build.kernel, inputs, call.scale, ("o", "lse", "dq"))
