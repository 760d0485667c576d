"""Train a tiny byte-level GPT in torch, with attention by flashgen: learned ALiBi slopes and a window, in one kernel.

The model has no position embeddings. Each head learns one slope, which a score captures; torch's optimizer updates it
like any other parameter.

python examples/train_small_model.py                 # on the CPU, by the emulator: slow, and the same code
python examples/train_small_model.py --target gpu    # on an NVIDIA GPU, a larger model in bf16
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.nn import functional

import flashgen as fg

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40
WINDOW = 24


class Attention(nn.Module):
    """Causal attention over the last WINDOW positions; each head leans towards near ones as much as it learns to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.slopes = nn.Parameter(torch.full((heads,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (batch, length, heads, head_dim)
        slopes = self.slopes
        out = fg.attention(q, k, v, mask=fg.window(WINDOW - 1, 0), score=lambda s, b, h, q, k: s - slopes[h] * (q - k))
        return self.out(out.flatten(2))


class Block(nn.Module):
    """Attention, then a layer of its own for each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(x)
        return x + self.dense(x)


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("emulator", "gpu"), default="emulator")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    on_gpu = options.target == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; leave --target out to train on the emulator")
    device = "cuda" if on_gpu else "cpu"
    width, heads, layers, length, batch, rate = (256, 4, 4, 256, 16, 1e-3) if on_gpu else (32, 2, 1, 32, 2, 1e-2)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, width), *(Block(width, heads) for _ in range(layers)), nn.Linear(width, 256)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    text = torch.tensor(list(TEXT), device=device)

    # Without a GPU, kernels for CPU tensors run on the emulator as long as this lasts.
    with contextlib.nullcontext() if on_gpu else fg.torch.emulate_cpu():
        for step in range(options.steps):
            start = time.perf_counter()
            at = torch.randint(len(TEXT) - length, (batch, 1), device=device) + torch.arange(length + 1, device=device)
            with torch.autocast(device, torch.bfloat16):
                logits = model(text[at[:, :-1]])
                loss = functional.cross_entropy(logits.flatten(0, 1), text[at[:, 1:]].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step:3}  loss {loss.item():.3f}  {time.perf_counter() - start:.2f} s")
    print("slopes of the first layer:", [round(x, 3) for x in model[1].attention[1].slopes.tolist()])


if __name__ == "__main__":
    main()
