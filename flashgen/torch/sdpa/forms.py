"""The masks and scores that other libraries have arguments for: few forms, each with a program made once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.spec import Mask, Score, alibi, chunked, softcap, window
from flashgen.spec import sink as sink_of
from flashgen.spec.masks.tensor_masks import element_at
from flashgen.torch.program import Program, written_program
from flashgen.torch.tracing.compiled import constant


class Form(NamedTuple):
    """All that decides a program: limits aligned to the last key, and the types of tensors."""

    left: int | None
    right: int | None
    #: Queries attend to their own chunk of so many positions.
    chunk: int | None = None
    #: Element type and axes of the mask. A mask of integers holds documents.
    mask: tuple[torch.dtype, str] | None = None
    biases: tuple[tuple[torch.dtype, str], ...] = ()
    #: As ``float.hex`` writes it: torch.compile takes texts for constants, and numbers for what may change.
    softcap: str | None = None
    #: Element type and number of dimensions of ALiBi's slopes.
    alibi: tuple[torch.dtype, int] | None = None
    sink: torch.dtype | None = None


def axes_of(tensor: Any, sizes: tuple[int, ...]) -> str:
    """Which indices a tensor has, "0" where it has one element for several: ``b0qk``, or ``bk`` if it is per key.

    ``sizes`` are those of the call: batch, heads, queries and keys.
    """
    names = "bk" if tensor.dim() == 2 else "bhqk"[4 - tensor.dim() :]
    wanted = dict(zip("bhqk", sizes, strict=True))
    return "".join(n if size == wanted[n] else "0" for size, n in zip(tensor.shape, names, strict=True))


@lru_cache(maxsize=1024)
def _program_for(form: Form) -> tuple[Program, tuple[int, ...]]:
    """The program, and where its tensors are among the mask, the biases and the sink that a call has."""
    tensors = []

    def like(dtype: torch.dtype, axes: str) -> Any:
        # What is traced is the element type and the number of dimensions.
        tensors.append(torch.zeros([1 if axis == "0" else 2 for axis in axes], dtype=dtype))
        return tensors[-1]

    mask = window(form.left, form.right)
    if form.chunk is not None:
        mask = mask & chunked(form.chunk)
    if form.mask is not None:
        mask = mask & _mask(like(*form.mask), form.mask[1])
    score = None if form.softcap is None else softcap(float.fromhex(form.softcap))
    if form.alibi is not None:
        dtype, rank = form.alibi
        score = _then(score, alibi(like(dtype, "bh"[2 - rank :])))
    for dtype, axes in form.biases:
        score = _then(score, _bias(like(dtype, axes), axes))
    if form.sink is not None:
        score = _then(score, sink_of(like(form.sink, "h")))
    program, ordered = written_program(mask, score)
    return program, tuple(next(i for i, t in enumerate(tensors) if t is tensor) for tensor in ordered)


def text_for(*form: Any) -> str:
    """The program's text, for torch.compile, which takes it as a constant, but no named tuple."""
    return str(_program_for(Form(*form))[0].rule)


def order_for(*form: Any) -> tuple[int, ...]:
    """The order of its tensors."""
    return _program_for(Form(*form))[1]


_function: Any
for _function in (text_for, order_for):
    # What torch.compiler.assume_constant_result sets, without loading the compiler.
    _function._dynamo_marked_constant = True


def program_for(form: Form, tensors: Sequence[Any]) -> tuple[Program, tuple[Any, ...]]:
    """The program, and its tensors: of the mask, the slopes, the biases and the sink, those that a call has."""
    if not torch.compiler.is_compiling():
        program, order = _program_for(form)
        return program, tuple([tensors[i] for i in order])
    # The compiler leaves sizes open, and limits are none.
    left, right, chunk, *types = form
    constants = (constant(left), constant(right), constant(chunk), *types)
    return Program(text_for(*constants)), tuple([tensors[i] for i in order_for(*constants)])


def _mask(tensor: Any, axes: str) -> Mask:
    if tensor.dtype != torch.bool:
        return Mask.of(lambda b, h, q, k: tensor[b, q] == tensor[b, k])
    return Mask.of(lambda b, h, q, k: element_at(tensor, axes, b, h, q, k))


def _bias(tensor: Any, axes: str) -> Score:
    return Score.of(lambda s, b, h, q, k: s + element_at(tensor, axes, b, h, q, k))


def _then(first: Score | None, second: Score) -> Score:
    return second if first is None else first >> second
