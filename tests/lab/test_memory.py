"""``fg.lab.memory`` against what calls allocate: on the emulator by array, on a GPU by torch's allocator."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from flashgen.spec.schedule import Algorithm

SPECS = {
    "Ampere": ("sm_80", fg.AttentionSpec(128, dtype="fp16", mask=fg.causal())),
    "Ampere deterministic": ("sm_80", fg.AttentionSpec(64, dtype="fp16", deterministic=True)),
    "Hopper": ("sm_90a", fg.AttentionSpec(128, dtype="fp16", mask=fg.causal())),
}
#: Their kernels leave arrays for others: S and P, O in float32, parts of O.
STORING: tuple[Algorithm, ...] = ("standard", "fa1", "grid2d")
CASES: list[tuple[str, fg.AttentionSpec, fg.Schedule]] = [
    *((arch, spec, fg.Schedule()) for arch, spec in SPECS.values()),
    *(("sm_80", fg.AttentionSpec(64, dtype="fp16"), fg.Schedule(algorithm=name)) for name in STORING),
]


@pytest.mark.parametrize(("arch", "spec", "schedule"), CASES, ids=[*SPECS, *STORING])
def test_a_call_allocates_what_is_predicted(
    arch: str, spec: fg.AttentionSpec, schedule: fg.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.launch.arrays.numpy_arrays import NumpyArrays
    from flashgen.launch.call.prepared import _APART

    kernel = fg.build(spec, schedule, arch=arch, target="emulator")
    made: list[int] = []
    allocate = NumpyArrays.allocate

    def counting(self: Any, like: Any, layouts: Any, stream: int) -> Any:
        arrays, addresses = allocate(self, like, layouts, stream)
        made.extend(array.nbytes for array in arrays)
        return arrays, addresses

    monkeypatch.setattr(NumpyArrays, "allocate", counting)
    import numpy as np

    q = np.zeros((1, 96, 2, spec.head_dim), np.float16)
    k = np.zeros((1, 160, 1, spec.head_dim), np.float16)
    out, lse = kernel(q, k, k)
    found = fg.lab.memory(spec, 96, 160, heads=2, heads_kv=1, arch=arch, schedule=schedule)
    forward = list(made)
    made.clear()
    kernel.backward(out, q, k, k, out, lse)
    for sizes, predicted in ((forward, found["forward"]), (made, found["backward"])):
        results, own = sizes[: len(predicted.results)], sizes[len(predicted.results) :]
        assert [-(-size // 512) * 512 for size in results] == list(predicted.results.values())
        # On the host each workspace is an array of its own; on a GPU all share one, some bytes apart.
        shared = sum(predicted.workspaces.values())
        assert sum(own) <= shared <= sum(own) + 2 * _APART * len(own) + 512 * bool(own)


def test_the_peak_of_training_is_that_of_the_backward_pass() -> None:
    found = fg.lab.memory(fg.AttentionSpec(64), 1024)
    assert found.peak == found["backward"].peak > found["forward"].peak
    matrix = 1024 * 64 * 2
    assert found["forward"].peak == 4 * matrix + 4 * 1024
    assert found["backward"].results == {"dq": matrix, "dk": matrix, "dv": matrix}


def test_a_forward_spec_has_one_pass() -> None:
    found = fg.lab.memory(fg.AttentionSpec(64, direction="forward"), 1000)
    assert [p.pass_ for p in found.passes] == ["forward"]
    # 1000 floats of LSE take eight blocks of 512 bytes.
    assert found["forward"].results["lse"] == 4096


def test_captured_tensors_are_refused() -> None:
    import numpy as np

    lengths = np.ones(2, np.int32)
    with pytest.raises(ArgumentError, match="captures tensors"):
        fg.lab.memory(fg.AttentionSpec(64, mask=lambda b, h, q, k: k < lengths[b]), 128)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize(
    ("algorithm", "deterministic", "batch", "length", "heads", "heads_kv"),
    [
        (None, False, 4, 4096, 16, 16),
        (None, True, 4, 4096, 16, 16),
        (None, False, 2, 8192, 16, 4),
        (None, True, 2, 8192, 16, 4),
        *((name, False, 2, 2048, 8, 8) for name in STORING),
    ],
)
def test_torchs_allocator_peaks_within_2_percent_of_the_prediction(
    algorithm: Algorithm | None, deterministic: bool, batch: int, length: int, heads: int, heads_kv: int
) -> None:
    torch = pytest.importorskip("torch")
    spec = fg.AttentionSpec(128, dtype="fp16", mask=fg.causal(), deterministic=deterministic)
    schedule = fg.Schedule(algorithm=algorithm)
    kernel = fg.build(spec, schedule).warmup()
    sizes: dict[str, int] = {"batch": batch, "heads": heads, "heads_kv": heads_kv}
    found = fg.lab.memory(spec, length, **sizes, arch=kernel.arch, schedule=schedule)

    def normal(heads: int) -> Any:
        return torch.randn(batch, length, heads, 128, device="cuda", dtype=torch.float16)

    def start() -> None:
        """Later allocations find no block to reuse that is larger than they need."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    q, k, v = normal(heads), normal(heads_kv), normal(heads_kv)
    start()
    out, lse = kernel(q, k, v)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(found["forward"].peak, rel=0.02)
    do = torch.randn_like(out)
    start()
    gradients = kernel.backward(do, q, k, v, out, lse)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(found["backward"].peak, rel=0.02)
    assert len(gradients) == 3
