"""What attention is, by a few lines of float64: the judge of everybody who is timed, ourselves included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attention_rows import Problem

#: Queries whose scores are in memory at once.
CHUNK = 1024


def expected(problem: Problem, made: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The output, or the gradients, of the last group of heads of the last sequence.

    ``made`` are queries, keys, values and the gradient of the output.
    """
    inputs = [x.detach().requires_grad_(problem.direction == "backward") for x in last_group(problem, made[:3])]
    (gradient,) = last_group(problem, made[3:])
    rows = []
    for first in range(0, problem.queries, CHUNK):
        part = _rows(problem, inputs, first)
        if problem.direction == "backward":
            part.backward(gradient[first : first + CHUNK])
        rows.append(part.detach())
    if problem.direction == "forward":
        return (torch.cat(rows),)
    gradients = [x.grad for x in inputs]
    return tuple(x for x in gradients if x is not None)


def last_group(problem: Problem, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of (batch, length, heads, head_dim) tensors the heads that share the last head of keys."""
    group = problem.heads // problem.kv_heads
    return tuple(x[-1, :, -(group if x.shape[2] == problem.heads else 1) :].double() for x in tensors)


def _rows(problem: Problem, inputs: Sequence[torch.Tensor], first: int) -> torch.Tensor:
    """The output of up to CHUNK queries."""
    q, k, v = inputs
    scores = torch.einsum("qgd,kd->gqk", q[first : first + CHUNK], k[:, 0]) * problem.head_dim**-0.5
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.causal:
        # The last query sees the last key.
        own = torch.arange(first, first + scores.shape[1], device=q.device)[:, None] + problem.keys - problem.queries
        keys = torch.arange(problem.keys, device=q.device)[None]
        forbidden = keys > own
        if problem.window is not None:
            forbidden = forbidden | (keys <= own - problem.window)
        scores = scores.masked_fill(forbidden, -torch.inf)
    return torch.einsum("gqk,kd->qgd", scores.softmax(dim=-1), v[:, 0])
