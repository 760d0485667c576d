"""``check``: run the project's own kernels on guarded arrays, and compare what they write with the oracle."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pytest

from flashgen import oracle
from flashgen.emulator import Buffer, guarded_copy, load
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.boxes import bytes_before, layout, tensor_map
from flashgen.launch.call.packed import packed_values
from flashgen.launch.call.prepared import tile_counts
from flashgen.plan import plan, workspaces
from flashgen.plan.model.params import INPUT_SCALES, V_FACTOR
from flashgen.plan.model.plans import AttentionPlan, Box, KernelPlan, Problem, Role
from flashgen.plan.quantize import QUANTIZE
from flashgen.plan.varlen import COUNTS, STARTS
from flashgen.render import KernelSource, render
from flashgen.spec import AttentionSpec, Dropout, Schedule
from flashgen.verify.cases.huge_strides import HugeStrideLayout
from flashgen.verify.cases.layouts import laid_out
from flashgen.verify.cases.packed import Packing
from tests.emulator.kernels.cached import check_cached
from tests.emulator.kernels.decoded import check_decoded
from tests.emulator.kernels.lineage import WHOLE_PASSES, check_lineage
from tests.emulator.kernels.quantized import check_quantized

Array = np.ndarray[Any, Any]
STRIDED = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
#: What each kernel writes that the oracle knows.
RESULTS: dict[Role, tuple[str, ...]] = {
    "forward": ("o", "lse"),
    "scores": (),
    "softmax": ("lse",),
    "ds": (),
    "dv": ("dv",),
    "dq": ("dq",),
    "dk": ("dk",),
    "prepare": (),
    "main": ("dk", "dv"),
    "query": ("dq",),
    "finish": ("dq",),
    "repair": ("dq", "dk", "dv"),
}
Edit = Callable[[str], str]
#: Blocks of kernels whose blocks stay: fewer than there are tiles.
STAYING_BLOCKS = 2


@dataclass(frozen=True)
class Case:
    """A spec, a schedule and a problem."""

    spec: AttentionSpec
    len_q: int
    len_kv: int
    heads: int = 2
    heads_kv: int = 2
    batch: int = 1
    arch: str = "sm_80"
    schedule: Schedule | None = None
    #: Which stride of arrays 32 bits cannot hold, if any.
    huge_stride: HugeStrideLayout | None = None
    #: Whether the loss depends on the log-sum-exp too.
    dlse: bool = False
    #: The index from the end of a row of V with an infinite element; 0: none.
    infinite_value_from_end: int = 0
    #: The same for K.
    infinite_key_from_end: int = 0
    #: The same for Q.
    infinite_query_from_end: int = 0
    #: The number of first heads without infinite elements.
    finite_heads: int = 0
    #: Where packed sequences are cut.
    packing: Packing | None = None
    #: How many blocks the sums of dQ are for, where there are not sums of all heads.
    sum_blocks: int | None = None
    #: In how many parts a decode kernel cuts the keys; 0: as blocks share them.
    splits: int = 0
    #: Multiprocessors of a decode kernel: enough for several blocks, or teams of them, to share the keys of a sequence.
    multiprocessors: int = 18
    #: Keys of a page, where a kernel attends to pages.
    page_size: int = 7

    @property
    def lengths(self) -> Any:
        return None if self.packing is None else self.packing.used

    @property
    def dropout(self) -> Dropout | None:
        return Dropout(0.4, 2**40 + 1, 2**33 + 4) if self.spec.dropout else None

    @property
    def problem(self) -> Problem:
        packed_rows = None if self.packing is None else self.packing.total_rows
        return Problem(self.batch, self.heads, self.heads_kv, self.len_q, self.len_kv, packed_rows=packed_rows)

    def __str__(self) -> str:
        sizes = f"B={self.batch} H={self.heads}/{self.heads_kv} Sq={self.len_q} Sk={self.len_kv}"
        return f"{self.spec.describe()} {self.arch} {sizes}"


@dataclass(frozen=True)
class Expected:
    """Inputs of a case and what the oracle makes of them."""

    inputs: dict[str, Array]
    exact: dict[str, Array]
    bounds: oracle.Bounds
    scale: float


@functools.lru_cache(maxsize=64)
def expected(case: Case, seed: int) -> Expected:
    spec, random = case.spec, np.random.default_rng(seed)
    shapes = {
        "q": (case.batch, case.len_q, case.heads, spec.head_dim),
        "k": (case.batch, case.len_kv, case.heads_kv, spec.head_dim),
        "v": (case.batch, case.len_kv, case.heads_kv, spec.head_dim_v),
        "dout": (case.batch, case.len_q, case.heads, spec.head_dim_v),
    }
    dtype = spec.element.numpy()
    inputs = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    infinite = (
        ("v", case.infinite_value_from_end),
        ("k", case.infinite_key_from_end),
        ("q", case.infinite_query_from_end),
    )
    for name, from_end in infinite:
        if from_end:
            inputs[name][:, -from_end, case.finite_heads :, 0] = np.inf
            inputs[name][:, -from_end - 1, :, 1] = -0.0
    q, k, v, dout = inputs.values()
    scale = spec.default_scale
    options: dict[str, Any] = {"scale": scale, "dropout": case.dropout, "lengths": case.lengths}
    scales = scales_of(case, random)
    everything = oracle.forward(spec, q, k, v, **options, **scales)
    inputs |= scales
    if case.dlse:
        options["dlse"] = inputs["dlse"] = (3.0 * random.standard_normal(everything[1].shape)).astype(np.float32)
    if spec.needs_backward:
        everything += oracle.backward(spec, q, k, v, dout, **options)
    exact = dict(zip(("o", "lse", "dq", "dk", "dv"), everything, strict=False))
    do = dout if spec.needs_backward else None
    bounds = oracle.bounds(spec, q, k, v, do, exact=everything, scales=scales, **options)
    expected_of = Expected(inputs, exact, bounds, scale)
    return expected_of if case.packing is None else packed(expected_of, case.packing, spec.scale_block)


def scales_of(case: Case, random: np.random.Generator) -> Any:
    """Scales of 8-bit inputs: all of them differ."""
    block = case.spec.scale_block
    if not case.spec.element.is_eight_bit:
        return {}
    sizes = {"q": (case.heads, case.len_q), "k": (case.heads_kv, case.len_kv), "v": (case.heads_kv, case.len_kv)}
    shapes = {n: (case.batch, heads, *([-(-rows // block)] if block else [])) for n, (heads, rows) in sizes.items()}
    return {f"{name}_scale": random.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()}


def packed(want: Expected, packing: Packing, block: int | None) -> Expected:
    """What is expected of the sequences one behind the other; rows that are not used hold NaN."""
    scales = {n: packing.pack_scales(x, n[0] in "kv", block) for n, x in want.inputs.items() if n.endswith("_scale")}
    inputs = {name: packing.pack(x, name in ("k", "v")) for name, x in want.inputs.items() if name not in scales}
    inputs |= scales
    rows = [(queries, keys) for queries, keys in packing.rows]

    def cut(x: Array, side: int) -> Array:
        return np.concatenate([one[: of[side]] for one, of in zip(x, rows, strict=True)])

    exact = {name: cut(x, name in ("dk", "dv")) for name, x in want.exact.items() if name != "lse"}
    lse, limit = (np.moveaxis(cut(np.moveaxis(x, 1, 2), 0), 0, 1) for x in (want.exact["lse"], want.bounds.lse))
    bounds = replace(want.bounds, lse=limit, rounded=None)  # slopes are judged where sequences are not packed
    return replace(want, inputs=inputs, exact={**exact, "lse": lse}, bounds=bounds)


class Check(Protocol):
    def __call__(self, case: Case, roles: Iterable[Role] = ..., **options: Any) -> list[str]: ...


@dataclass
class Run:
    """One case under way: its arrays, beside pages that trap."""

    case: Case
    seed: int = 0
    at: str = "end"
    arrays: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        case, want = self.case, expected(self.case, self.seed)
        self.plan = self.planned()
        self.want = want
        dtype = case.spec.element.numpy()
        # The backward kernels are given what the oracle says of the forward pass.
        made = {"o": want.exact["o"].astype(case.spec.out_element.numpy()), "lse": want.exact["lse"].astype(np.float32)}
        nan = np.float32(np.nan)
        outputs = {f"d{name}": np.full(want.inputs[name].shape, nan, dtype) for name in "qkv"}
        workspace = {
            "dsum": np.full(want.exact["lse"].shape, nan, np.float32),
            **{name: np.full(floats, nan, np.float32) for name, floats in workspaces(self.plan, case.problem).items()},
        }
        for kernel in self.plan.kernels:
            for stored in kernel.workspaces:
                element = np.float32 if stored.dtype == "fp32" else dtype
                workspace[stored.name] = np.full(kernel.extents(stored, case.problem), nan, element)
        everything = {**want.inputs, **made, **outputs, **workspace, "counter": np.zeros(2, np.uint32)}
        if case.packing is not None:
            everything |= self.starts(case.packing)
        self.arrays = {
            name: laid_out(a, case.huge_stride, a.dtype)
            if case.huge_stride and name in STRIDED
            else guarded_copy(a, at=self.at)  # type: ignore[arg-type]
            for name, a in everything.items()
        }

    def planned(self) -> AttentionPlan:
        case = self.case
        made = plan(case.spec, case.schedule, case.arch)
        blocks = case.sum_blocks
        if blocks is None:
            return made

        def with_few(kernel: KernelPlan) -> KernelPlan:
            return kernel if kernel.sums is None else replace(kernel, sums=replace(kernel.sums, blocks=blocks))

        return replace(made, kernels=tuple(with_few(kernel) for kernel in made.kernels))

    def starts(self, packing: Packing) -> dict[str, Array]:
        given = packing.sequences(self.case.len_q, self.case.len_kv)
        return {name: getattr(given, name) for name in (*STARTS, *COUNTS)}

    def launch(self, role: Role, edit: Edit | None, **options: Any) -> None:
        kernel = self.plan.kernel(role)
        source = rendered(kernel)
        if edit is not None:
            source = KernelSource(kernel, edit(source.text))
        # A repair keeps what it does not compute again.
        for name in () if role == "repair" else results_of(kernel):
            self.arrays[name][...] = np.nan
        workspaces = {"dsum", "dq_accum", "row_stats", "head_counts", "dq_semaphore", "failed_tiles", "counter"}
        workspaces |= {stored.name for stored in kernel.workspaces}
        writable = {*results_of(kernel), *workspaces}
        early = kernel.overlaps_predecessor
        buffers = [Buffer(n, a.ctypes.data, a.nbytes, n in writable, early) for n, a in self.arrays.items()]
        if self.case.huge_stride:
            buffers = []  # race mode cannot keep a record of so many bytes
        grid = grid_of(kernel, self.case.problem)
        if kernel.is_persistent:
            grid = (min(STAYING_BLOCKS, math.prod(grid)), 1, 1)
        if not options.get("race"):
            # Traffic is counted by the build for race mode: one build, which takes longest, serves all modes.
            options.setdefault("traffic", [])
        load(source, race=True).launch(grid, self.params(kernel), buffers, **options)

    def params(self, kernel: KernelPlan) -> bytes:
        case, scale = self.case, self.want.scale
        lower, upper = case.spec.mask.diagonals(case.len_q, case.len_kv)
        values: dict[str, Any] = {
            "batch": case.batch,
            "heads_q": case.heads,
            "heads_kv": case.heads_kv,
            "len_q": case.len_q,
            "len_kv": case.len_kv,
            "group": case.heads // case.heads_kv,
            "score_pitch": case.problem.score_pitch,
            "band_lower": lower,
            "band_upper": upper,
            "scale": scale,
            "scale_log2": scale * math.log2(math.e),
            **tile_counts(kernel, case.problem),
            "dlse": 0,
            V_FACTOR: 1.0,
        }
        if case.dropout is not None:
            values |= {"dropout_state": 0, "dropout_seed": case.dropout.seed, "dropout_offset": case.dropout.offset}
            values |= {"dropout_below": case.dropout.dropped_below, "dropout_factor": case.dropout.factor}
        if case.packing is not None:
            values |= packed_values(case.spec.mask, replace(case.problem, len_q=self.arrays["q"].shape[0]))
        for name, array in self.arrays.items():
            values[name] = array.ctypes.data
            if name in INPUT_SCALES:
                # Scales of blocks of packed rows have no batch.
                axes = array.ndim - (case.spec.scale_block is not None)
                steps = [0] * (2 - axes) + [stride // array.itemsize for stride in array.strides[:axes]]
                values |= {f"{name}_batch": steps[0], f"{name}_head": steps[1]}
            if name in STRIDED:
                steps = [0] * (4 - array.ndim) + [stride // array.itemsize for stride in array.strides]
                values |= {f"{name}_batch": steps[0], f"{name}_row": steps[1], f"{name}_head": steps[2]}
        values |= {box.parameter: self.tensor_map(box) for box in kernel.boxes}
        packed = struct.pack(kernel.params.format, *(values[name] for name in kernel.params.names))
        return packed.ljust(kernel.params.bytes, b"\0")

    def tensor_map(self, box: Box) -> bytes:
        """The tensor map arguments of an array."""
        array, dtype = self.arrays[box.tensor], self.case.spec.dtype
        array = array[None] if array.ndim == 3 else array
        strides = tuple(stride // array.itemsize for stride in array.strides)
        info = ArrayInfo(box.tensor, array.ctypes.data, array.shape, strides, box.element or dtype, 0)
        dims, strides = layout(info, box, dtype, self.case.problem)
        address = info.pointer - bytes_before(box, self.case.problem, strides)
        return tensor_map(box, dtype, address, dims, strides).for_emulator()

    def wrong(self, role: Role) -> list[str]:
        """What the kernel wrote that is not within its bound, or is off by a factor."""
        found = [f"counter: left at {self.arrays['counter'].tolist()}"] if self.arrays["counter"].any() else []
        for name in results_of(self.plan.kernel(role)):
            with np.errstate(invalid="ignore"):
                result = self.arrays[name].astype(np.float64)
            bound = getattr(self.want.bounds, name)
            verdict = oracle.check(result, self.want.exact[name], bound, exact_infinity=name == "lse")
            if not verdict.ok:
                error, limit = verdict.worst or (verdict.max_error, verdict.bound)
                found.append(f"{name}: error {error:.3g}, bound {limit:.3g} {verdict.note}")
            elif name != "lse" and self.want.bounds.rounded is not None:
                run = self.want.bounds.rounded
                of_case = oracle.case_slope(result, self.want.exact[name], bound, getattr(run, name), run.pairs)
                slope = oracle.pooled_slope([of_case])
                if slope is not None and not slope.ok:
                    found.append(f"{name}: slope {slope.value:.5f}, noise {slope.noise:.1e}")
        return found


#: Each mode and each planted bug begins with the same text.
rendered = functools.lru_cache(maxsize=64)(render)


def results_of(kernel: KernelPlan) -> tuple[str, ...]:
    """What a kernel leaves finished."""
    finishes = kernel.role == "main" and (kernel.sums or kernel.adds_in_order)
    results = ("dq", *RESULTS[kernel.role]) if finishes else RESULTS[kernel.role]
    # L of standard attention comes from the softmax kernel.
    return tuple(name for name in results if name != "lse" or name in kernel.params.names)


def grid_of(kernel: KernelPlan, problem: Problem) -> tuple[int, int, int]:
    if kernel.grid_over in ("pairs", "flags"):
        return kernel.grid(problem)
    length = problem.len_q if kernel.grid_over == "q" else problem.len_kv
    heads = problem.heads_q if kernel.grid_heads == "q" else problem.heads_kv
    return -(-length // kernel.grid_tile), heads, problem.batch


@pytest.fixture
def check() -> Check:
    def check_(
        case: Case,
        edits: dict[Role, Edit] | None = None,
        *,
        data_seed: int = 0,
        at: str = "end",
        **options: Any,
    ) -> list[str]:
        """What is wrong after the edited kernels, or all, and those that they need and that need them."""
        if case.spec.scale_block and set(edits or {QUANTIZE}) == {QUANTIZE}:
            wrong = check_quantized(case, edits or {}, data_seed=data_seed, at=at, **options)
            if wrong or edits:
                return wrong
        if case.spec.cache and case.schedule is None:
            return check_decoded(case, edits or {}, data_seed=data_seed, at=at, **options)
        if case.spec.cache:
            return check_cached(case, edits or {}, data_seed=data_seed, at=at, **options)
        if case.schedule is not None and case.schedule.algorithm in WHOLE_PASSES:
            return check_lineage(case, edits or {}, expected(case, data_seed), at=at, **options)
        run = Run(case, data_seed, at)
        # clear_gaps writes rows that no other writes: tests/kernels/test_padding.py plants its bugs.
        roles = [kernel.role for kernel in run.plan.kernels if kernel.role not in ("clear_gaps", QUANTIZE)]
        wanted = set(edits or roles)
        if wanted - {"forward"}:
            wanted |= {"prepare", "main", "finish"}
        if run.plan.stores_probabilities:
            # Each kernel reads what the ones before it leave in memory.
            wanted |= set(roles)
        # Gradients that a repair may compute again are judged after it.
        repaired = {"main", "query"} if run.plan.has("repair") else set()
        if wanted - {"forward"} and repaired:
            wanted |= {*repaired, "repair"}
        wrong = []
        for role in roles:
            if role in wanted:
                run.launch(role, (edits or {}).get(role), **options)
                wrong += run.wrong(role) if role not in repaired else []
        return wrong

    return check_


@pytest.fixture
def case() -> type[Case]:
    """The type of cases."""
    return Case
