"""Trains a small byte-level GPT twice over, by flashgen and by torch's scaled_dot_product_attention, on one GPU.

    python benchmarks/training.py [--steps 200] [--json losses.json] [--plot losses.svg]
    python benchmarks/training.py --packed    # rows of several documents, and dropout of probabilities

Both start from the same weights and see the same text, this project's own sources, in the same order, in bf16
autocast. What they may differ by shows in a second seed, and in how far torch differs from itself when it is run again.
With ``--packed`` each implementation draws a dropout pattern of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import flashgen as fg

ROOT = Path(__file__).resolve().parent.parent
#: Of probabilities, and the mean length of a document, with ``--packed``.
DROPOUT, DOCUMENT = 0.1, 500
#: Steps that are not timed: kernels are built and tuned in them.
WARMUP = 10


class Documents(NamedTuple):
    """How the rows of a batch are cut into documents that do not attend to each other."""

    #: Where each begins among the tokens of the batch, and the end.
    starts: torch.Tensor
    longest: int
    #: For each row, which pairs of tokens may attend.
    mask: torch.Tensor

    @classmethod
    def drawn(cls, batch: int, length: int, generator: torch.Generator) -> Documents:
        """Documents of log-normal lengths that fill each row."""
        lengths: list[int] = []
        for _ in range(batch):
            left = length
            while left:
                size = int(DOCUMENT * torch.randn((), generator=generator).exp() / math.exp(0.5))
                lengths.append(min(max(size, 1), left))
                left -= lengths[-1]
        counts = torch.tensor(lengths)
        starts = functional.pad(counts.cumsum(0), (1, 0)).int().cuda()
        number = torch.repeat_interleave(counts).view(batch, 1, length).cuda()
        mask = (number[..., :, None] == number[..., None, :]).tril()
        return cls(starts, max(lengths), mask)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Documents | None"], torch.Tensor]


def by_flashgen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None) -> torch.Tensor:
    """Causal attention over (batch, length, heads, dim)."""
    if documents is None:
        return fg.attention(q, k, v, mask=fg.causal())
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    starts, longest, mask = documents
    places = (starts, starts, longest, longest)
    return fg.flash_attn_varlen_func(q, k, v, *places, dropout_p=DROPOUT, causal=True).unflatten(0, (len(mask), -1))


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None) -> torch.Tensor:
    """The same by torch, which takes heads before length, and documents as a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    more = {"is_causal": True} if documents is None else {"attn_mask": documents.mask, "dropout_p": DROPOUT}
    return functional.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Attention, then a layer of its own for each token."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v, documents).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, length: int, width: int, heads: int, layers: int, attend: Attend) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.last, self.logits = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Logits, (batch, length, 256)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, documents)
        return self.logits(self.last(x))


def text() -> torch.Tensor:
    """The project's sources, byte by byte."""
    files = sorted(p for folder in ("flashgen", "templates", "tests", "docs") for p in (ROOT / folder).rglob("*.*"))
    found = b"".join(p.read_bytes() for p in files if p.suffix in (".py", ".cuh", ".j2", ".md", ".h"))
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long().cuda()


def train(attend: Attend, seed: int, options: argparse.Namespace, data: torch.Tensor) -> tuple[list[float], float]:
    """The loss of every step, and the median time of one in milliseconds."""
    torch.manual_seed(seed)
    model = Model(options.length, options.width, options.heads, options.layers, attend).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    order = torch.Generator().manual_seed(seed)
    losses, times = [], []
    for step in range(options.steps):
        starts = torch.randint(len(data) - options.length - 1, (options.batch,), generator=order)
        batch = torch.stack([data[s : s + options.length + 1] for s in starts.tolist()])
        documents = Documents.drawn(options.batch, options.length, order) if options.packed else None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(batch[:, :-1], documents)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step >= WARMUP:
            times.append((time.perf_counter() - begin) * 1e3)
    return losses, statistics.median(times)


def plot(runs: dict[str, dict[str, Any]], file: Path) -> None:
    """The curves, by matplotlib."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for name, run in runs.items():
        axes.plot(run["losses"], label=name, linewidth=1, linestyle="-" if name.startswith("flashgen") else "--")
    axes.set(xlabel="step", ylabel="loss", ylim=(2.5, 4.0))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Prints the losses side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in {"steps": 200, "length": 2048, "batch": 8, "width": 1024, "heads": 8, "layers": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--packed", action="store_true", help="rows of several documents, and dropout")
    parser.add_argument("--json", type=Path, help="also write every loss here")
    parser.add_argument("--plot", type=Path, help="also draw the curves here (matplotlib)")
    options = parser.parse_args()
    data, runs = text(), {}
    for name, attend, seed in (
        ("flashgen, seed 0", by_flashgen, 0),
        ("torch, seed 0", by_torch, 0),
        ("torch again, seed 0", by_torch, 0),
        ("flashgen, seed 1", by_flashgen, 1),
        ("torch, seed 1", by_torch, 1),
    ):
        losses, milliseconds = train(attend, seed, options, data)
        runs[name] = {"losses": losses, "milliseconds": milliseconds}
        print(f"{name:22} {milliseconds:7.2f} ms a step, last loss {losses[-1]:.4f}", flush=True)
    print("| step | " + " | ".join(runs) + " |\n| ---: |" + " ---: |" * len(runs))
    for step in [*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1]:
        print(f"| {step} | " + " | ".join(f"{run['losses'][step]:.4f}" for run in runs.values()) + " |")
    if options.json:
        record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": runs}
        options.json.write_text(json.dumps(record))
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
