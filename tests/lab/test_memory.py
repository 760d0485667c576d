"""``fg.lab.memory`` against what calls allocate: on the emulator by array, on a GPU by torch's allocator."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen.errors import ArgumentError

SPECS = {
    "Ampere": ("sm_80", fg.AttentionSpec(128, dtype="fp16", mask=fg.causal())),
    "Ampere deterministic": ("sm_80", fg.AttentionSpec(64, dtype="fp16", deterministic=True)),
    "Hopper": ("sm_90a", fg.AttentionSpec(128, dtype="fp16", mask=fg.causal())),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_call_allocates_what_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.launch.arrays.numpy_arrays import NumpyArrays
    from flashgen.launch.call.prepared import _APART

    arch, spec = SPECS[name]
    kernel = fg.build(spec, arch=arch, target="emulator")
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
    found = fg.lab.memory(spec, 96, 160, heads=2, heads_kv=1, arch=arch)
    assert [-(-size // 512) * 512 for size in made] == list(found["forward"].results.values())
    made.clear()
    kernel.backward(out, q, k, k, out, lse)
    backward = found["backward"]
    assert [-(-size // 512) * 512 for size in made[:3]] == list(backward.results.values())
    # On the host each workspace is an array of its own; on a GPU all share one, some bytes apart.
    shared, own = sum(backward.workspaces.values()), sum(made[3:])
    assert own < shared <= own + 2 * _APART * len(made[3:]) + 512


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
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("batch", "length", "heads", "heads_kv"), [(4, 4096, 16, 16), (2, 8192, 16, 4)])
def test_torchs_allocator_peaks_within_2_percent_of_the_prediction(
    batch: int, length: int, heads: int, heads_kv: int, deterministic: bool
) -> None:
    torch = pytest.importorskip("torch")
    spec = fg.AttentionSpec(128, dtype="fp16", mask=fg.causal(), deterministic=deterministic)
    kernel = fg.build(spec).warmup()
    found = fg.lab.memory(spec, length, batch=batch, heads=heads, heads_kv=heads_kv, arch=kernel.arch)

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
