"""``torch.vmap`` over the operators: the mapped dimension becomes part of the batch."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.torch.ops import library


def _fold(x: Any, dim: int | None, size: int) -> Any:
    """The mapped dimension in front of the batch, merged with it."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _mapped(op: Any, tensors: int) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = [_fold(x, d, size) for x, d in zip(arguments[:tensors], in_dims[:tensors], strict=True)]
        results = op(*folded, *arguments[tensors:])
        unfolded = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)
        return unfolded, tuple(0 for _ in unfolded)

    return rule


torch.library.register_vmap("flashgen::forward", _mapped(torch.ops.flashgen.forward, 3), lib=library)
torch.library.register_vmap("flashgen::backward", _mapped(torch.ops.flashgen.backward, 6), lib=library)
