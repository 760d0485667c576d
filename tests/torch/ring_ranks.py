"""Four processes on the CPU that attend together by torch's ring attention: run by test_ring_attention.py.

    python ring_ranks.py RENDEZVOUS

Every process prints one line for each way of attending: its rank, the way, and the largest error of its part.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import flashgen as fg

RANKS = 4
LENGTH = 32


def reference(q: Any, k: Any, v: Any, do: Any, is_causal: bool) -> tuple[Any, ...]:
    """The whole result, by torch's plain formula in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), float("-inf"))
    out = scores.softmax(-1) @ v
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), do.double()))


def attend(mesh: Any, q: Any, k: Any, v: Any, do: Any, is_causal: bool) -> tuple[Any, ...]:
    """This rank's part of the same, by torch's ring over its flash attention operators."""
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = ring._scaled_dot_product_ring_flash_attention(
        mesh, q, k, v, is_causal=is_causal
    )
    gradients = ring._scaled_dot_product_ring_flash_attention_backward(
        mesh, do, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset
    )
    return (out, *gradients)


def run(rank: int, rendezvous: str) -> None:
    """One of the processes."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    calls = []
    launch, backward = fg.Kernel.__call__, fg.Kernel.backward
    fg.Kernel.__call__ = lambda self, *a, **o: (calls.append("forward"), launch(self, *a, **o))[1]
    fg.Kernel.backward = lambda self, *a, **o: (calls.append("backward"), backward(self, *a, **o))[1]
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, LENGTH, 16, generator=generator) for _ in range(4)]
    with fg.torch.emulate_cpu(), fg.torch.enable_sdpa():
        for is_causal, is_balanced in ((False, False), (True, False), (True, True)):
            ring._cp_options.enable_load_balance = is_balanced
            rows = torch.arange(LENGTH).chunk(RANKS)[rank]
            if is_balanced:
                parts = torch.arange(LENGTH).chunk(2 * RANKS)
                rows = torch.cat([parts[rank], parts[-1 - rank]])
            calls.clear()
            found = attend(mesh, *(x[:, :, rows].contiguous() for x in whole), is_causal)
            exact = reference(*whole, is_causal)
            error = max(float((a - b[:, :, rows]).abs().max()) for a, b in zip(found, exact, strict=True))
            way = f"{'causal' if is_causal else 'full'}{' balanced' if is_balanced else ''}"
            # In one piece, newline included: the processes share what they write to.
            sys.stdout.write(f"{rank} {way}: {calls.count('forward')} {calls.count('backward')} {error:.3g}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
