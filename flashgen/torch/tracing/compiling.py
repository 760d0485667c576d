"""Attention inside torch.compile and torch.export, which watch: one operator whose program is a constant text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.spec import Mask, Score, Sequences
from flashgen.torch.function import over_batch
from flashgen.torch.operators.packed import arrays_of
from flashgen.torch.randomness import drawn_state
from flashgen.torch.tracing import compiled
from flashgen.torch.tracing.program import limits_of, mask_of, score_of
from flashgen.torch.tracing.recorder import Recorder, register_with_compiler


def attend_compiled(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score: Any,
    scale: float | None,
    deterministic: bool | None,
    dropout_p: float,
    sequences: Sequences | None,
) -> tuple[Any, Any]:
    """``(out, lse)``; captured tensors are inputs of the graph."""
    mask_said: Any = None
    score_said: Any = None
    limits: tuple[int | None, ...] = (None, None, None, None)
    tensors: list[Any] = []
    recorder = Recorder()
    if not torch.compiler.is_dynamo_compiling():
        # torch.export runs Python itself, so functions can be traced as usual.
        mask, score = mask_of(mask), score_of(score)
    if isinstance(mask, Mask):
        if mask.rest is None:
            limits = limits_of(mask)
        else:
            form: Any = mask.form
            mask_said = form.name
            tensors += [mask.rest.tensors[name] for name in compiled.mask_names(form.name)]
    elif mask is not None:
        mask_said = _followed(recorder, "mask", mask, "bhqk")
    if isinstance(score, Score):
        score_said = score.form.name
        tensors += [score.traced.tensors[name] for name in compiled.score_names(score_said)]
        if score.sink is not None:
            tensors += [score.sink.tensors[name] for name in compiled.sink_names(score_said)]
    elif score is not None:
        score_said = _followed(recorder, "score", score, "sbhqk")
    recorded = mask_said, score_said, limits, tuple(recorder.steps), recorder.declared()
    tensors += recorder.tensors
    captured = [tensors[i] for i in compiled.order(*recorded)]
    return by_operator(q, k, v, captured, compiled.text(*recorded), scale, deterministic, dropout_p, sequences)


def _followed(recorder: Recorder, name: str, function: Any, arguments: str) -> Any:
    """What a function did, which the compiler follows."""
    if not callable(function) or isinstance(function, (type, Mask, Score)):
        raise ArgumentError(f"{name} is a {type(function).__qualname__}; pass a flashgen {name.title()} or a function")
    if not register_with_compiler():
        raise ArgumentError(
            f"torch.compile of torch {torch.__version__} cannot look into a {name} function; make a flashgen."
            f"{name.title()}.of(function) outside of the compiled function, and pass that"
        )
    return recorder.call(function, *arguments)


def by_operator(
    q: Any,
    k: Any,
    v: Any,
    captured: Iterable[Any],
    text: str,
    scale: float | None,
    deterministic: bool | None,
    dropout_p: float = 0.0,
    sequences: Sequences | None = None,
    state: Any = None,
) -> tuple[Any, Any]:
    """The same through the dispatcher, whoever watches."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    program = list(captured), text, scale, deterministic, dropout_p, drawn_state(dropout_p, q, state)
    result: tuple[Any, Any]
    if sequences is None:
        k, v = over_batch(q, k), over_batch(q, v)
        result = torch.ops.flashgen.program_forward(q, k, v, *program)
    else:
        longest = sequences.max_seqlen_q, sequences.max_seqlen_k
        result = torch.ops.flashgen.varlen_forward(q, k, v, *arrays_of(sequences), *longest, *program)
    return result
