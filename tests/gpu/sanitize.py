"""One small call of every kernel family, for NVIDIA's checkers to watch.

for tool in memcheck racecheck synccheck initcheck; do
    compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python tests/gpu/sanitize.py
done

A cuda-python that is newer than the driver asks it for functions that it does not have yet: no error of ours.
Outputs start as NaN, and must be finite when all is done: initcheck does not see what TMA stores, and
would take results for memory that no thread has written.
"""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg
from flashgen.launch.arrays import torch_arrays
from flashgen.spec import Score

# In the last shape blocks take several tiles each, so that every slot is used again.
SHAPES = ((1, 130, 4, 2, 200), (2, 77, 2, 2, 1), (1, 1, 2, 1, 150), (80, 130, 4, 2, 200))
IDS = (torch.arange(200, device="cuda") // 60).to(torch.int32).repeat(80, 1)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 1.0], device="cuda")
SPECS: tuple[tuple[fg.AttentionSpec, fg.Schedule | None], ...] = (
    (fg.AttentionSpec(64), None),
    (fg.AttentionSpec(64, mask=fg.causal()), None),
    (fg.AttentionSpec(128, mask=fg.causal()), None),
    (fg.AttentionSpec(128), None),
    (fg.AttentionSpec(128, mask=fg.window(50, 20), deterministic=True), None),
    (fg.AttentionSpec(96, deterministic=True), None),
    (fg.AttentionSpec(40, head_dim_v=72, dtype="fp16", mask=fg.causal("top-left")), None),
    (fg.AttentionSpec(21, dtype="fp16", mask=fg.causal()), None),
    (fg.AttentionSpec(64, dtype="fp32", mask=fg.causal()), None),
    (fg.AttentionSpec(256, mask=fg.causal()), None),
    # Rows grow from tile to tile, and scores are taken once more.
    (fg.AttentionSpec(256, score=Score.of(lambda s, b, h, q, k: s - 2.0 * k)), None),
    (fg.AttentionSpec(192, head_dim_v=128, dtype="fp16", mask=fg.causal()), None),
    (fg.AttentionSpec(256, mask=fg.causal() & fg.document(IDS), score=fg.softcap(3.0), deterministic=True), None),
    (fg.AttentionSpec(128, mask=fg.causal()), fg.Schedule(algorithm="fa2")),
    (fg.AttentionSpec(128, mask=fg.causal()), fg.Schedule(softmax="running-max")),
    (fg.AttentionSpec(64, mask=fg.causal()), fg.Schedule(algorithm="standard")),
    (fg.AttentionSpec(40, head_dim_v=72, dtype="fp32"), fg.Schedule(algorithm="standard")),
    (fg.AttentionSpec(64, mask=fg.causal()), fg.Schedule(algorithm="fa1")),
    (fg.AttentionSpec(40, head_dim_v=72, dtype="fp32"), fg.Schedule(algorithm="fa1")),
    *((fg.AttentionSpec(40, mask=fg.causal()), fg.Schedule(algorithm=name)) for name in ("naive", "grid1d", "grid2d")),
    (fg.AttentionSpec(128, mask=fg.causal() & fg.document(IDS), score=fg.softcap(3.0)), None),
    (fg.AttentionSpec(64, mask=fg.causal()), fg.Schedule(warps=fg.WarpPartition("split_k", 4))),
    (fg.AttentionSpec(96), fg.Schedule(stages=3, tile_q=64, tile_kv=32)),
    (fg.AttentionSpec(64, mask=fg.causal() & fg.document(IDS), score=fg.softcap(3.0) >> fg.alibi(SLOPES)), None),
    # A softcap that needs shares of its own.
    (fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(200.0)), None),
    (fg.AttentionSpec(128, dtype="fp16", mask=fg.causal() & fg.document(IDS), score=fg.softcap(100.0)), None),
    (fg.AttentionSpec(256, score=fg.softcap(200.0)), fg.Schedule(softmax="reference-max")),
    (fg.AttentionSpec(64, mask=fg.window(20, 0) | fg.global_tokens(5), score=fg.sink(SLOPES)), None),
    (fg.AttentionSpec(64, score=fg.bias(torch.randn(4, 200, 200, device="cuda")), deterministic=True), None),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def filled(self: Any, like: Any, layouts: Any, stream: int) -> Any:
    """Outputs before kernels write them."""
    made = [like.new_empty(shape, dtype=dtype).fill_(torch.nan) for shape, _, dtype in layouts]
    return made, [x.data_ptr() for x in made]


def main() -> None:
    """Runs them all, forward and backward."""
    torch_arrays.TorchArrays.allocate = filled  # type: ignore[method-assign]
    for spec, schedule in SPECS:
        kernel = fg.build(spec, schedule)
        dtype = DTYPES[spec.dtype]
        for batch, len_q, heads, heads_kv, len_kv in SHAPES:
            q = torch.randn(batch, len_q, heads, spec.head_dim, device="cuda", dtype=dtype)
            k = torch.randn(batch, len_kv, heads_kv, spec.head_dim, device="cuda", dtype=dtype)
            v = torch.randn(batch, len_kv, heads_kv, spec.head_dim_v, device="cuda", dtype=dtype)
            out, lse = kernel(q, k, v)
            do = torch.randn_like(out)
            *gradients, captured = kernel.backward(do, q, k, v, out, lse, captured_gradients=True)
            torch.cuda.synchronize()
            assert all(torch.isfinite(x).all() for x in (out, *gradients, *captured.values()))
        print(spec.describe(), flush=True)
    for mask, is_seen in ((fg.causal(), True), (fg.causal() & fg.document(IDS), False)):
        for head_dim in (64, 128, 256):
            take_once_more(fg.AttentionSpec(head_dim, mask=mask, direction="forward"), is_seen)


def take_once_more(spec: fg.AttentionSpec, is_seen: bool) -> None:
    """Values that only the last query may attend to, if it does, are infinite: tiles of queries are recomputed."""
    batch, len_q, heads, heads_kv, len_kv = SHAPES[-1]
    q, k, v = (
        torch.randn(batch, length, count, spec.head_dim, device="cuda", dtype=DTYPES[spec.dtype])
        for length, count in ((len_q, heads), (len_kv, heads_kv), (len_kv, heads_kv))
    )
    v[:, -1] = torch.inf
    out, _ = fg.build(spec)(q, k, v)
    torch.cuda.synchronize()
    assert torch.isfinite(out[:, :-1]).all()
    assert torch.isfinite(out[:, -1]).any() != is_seen
    print(spec.describe(), "with infinite values", flush=True)


if __name__ == "__main__":
    main()
