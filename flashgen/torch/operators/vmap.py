"""``torch.vmap`` over the operators: the mapped dimension becomes part of the batch, where nothing indexes that."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.torch.operators import attention  # noqa: F401  (it defines operators)
from flashgen.torch.operators.library import arguments_by_name, library


def _fold(x: Any, dim: int | None, size: int) -> Any:
    """The mapped dimension in front of the batch, merged with it."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _folded(op: Any) -> Any:
    """One call for all: every tensor has the batch in front; but where there is a state of dropout, a call each."""
    operator = op.__name__

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if arguments_by_name(operator, arguments)["rng_state"] is not None:
            each: tuple[Any, Any] = _one_by_one(op)(info, in_dims, *arguments)
            return each
        # Trailing arguments that have their default may be missing, and so are their dimensions.
        dims = (*in_dims, *(None for _ in arguments[len(in_dims) :]))
        folded = [_fold(x, d, size) if torch.is_tensor(x) else x for x, d in zip(arguments, dims, strict=True)]
        unfolded = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in op(*folded))
        return unfolded, tuple(0 for _ in unfolded)

    return rule


def _one_by_one(op: Any) -> Any:
    """A call for each: captured tensors may be indexed by the batch, so that must stay what it is."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        dims = (*in_dims, *(None for _ in arguments[len(in_dims) :]))
        calls = [op(*(_taken(x, d, i) for x, d in zip(arguments, dims, strict=True))) for i in range(info.batch_size)]
        stacked = tuple(
            [torch.stack(parts) for parts in zip(*results, strict=True)]
            if isinstance(results[0], (list, tuple))
            else torch.stack(results)
            for results in zip(*calls, strict=True)
        )
        return stacked, tuple([0] * len(x) if isinstance(x, list) else 0 for x in stacked)

    return rule


def _taken(x: Any, dim: Any, i: int) -> Any:
    """The i-th of what is mapped over, in lists too."""
    if isinstance(dim, (list, tuple)):
        return [_taken(element, d, i) for element, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


_ops = torch.ops.flashgen
for _name, _rule in (
    ("forward", _folded(_ops.forward)),
    ("backward", _folded(_ops.backward)),
    ("program_forward", _one_by_one(_ops.program_forward)),
    ("program_backward", _one_by_one(_ops.program_backward)),
    ("varlen_forward", _one_by_one(_ops.varlen_forward)),
    ("varlen_backward", _one_by_one(_ops.varlen_backward)),
):
    torch.library.register_vmap(f"flashgen::{_name}", _rule, lib=library)
