"""``attention``: what people call, and the choice between the two doors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.kernel import Kernel
from flashgen.launch.joined import run
from flashgen.spec import Dropout, Mask, Score, Sequences, causal, full, window
from flashgen.torch import compiled, ops, program_ops, varlen_ops  # noqa: F401  (they register themselves)
from flashgen.torch.function import attention_function, program_function, rows_contiguous, wants_gradients
from flashgen.torch.kernels import NO_LIMITS, What, kernel_for
from flashgen.torch.packed import arrays_of, check_sequences, longest_of
from flashgen.torch.programs import Program, check_tensors, limits_of, mask_of, program_of, score_of
from flashgen.torch.randomness import drawn_state, dropout_of
from flashgen.torch.replay import again, remember

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LAYOUTS = ("bshd", "bhsd")
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack

for _maker in (causal, full, window):
    # What torch.compiler.assume_constant_result sets, without loading the compiler: a mask that a compiled
    # function makes is made while it is traced.
    _maker._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    sequences: Sequences | None = None,
) -> Any:
    """Softmax attention with autograd: ``softmax(score(scale * q k^T), masked) v``.

    q is ``(B, Sq, H, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``; with ``layout="bhsd"`` lengths and heads
    change places, here and in the output. ``mask`` is a Mask such as ``flashgen.causal()``, a function
    ``(b, h, q, k) -> condition``, or None for all keys; ``score`` a Score such as ``flashgen.softcap(30.0)``, a
    function ``(s, b, h, q, k) -> number``, or None. Tensors that they capture are torch tensors on q's device;
    float tensors that the score captured get gradients. ``scale`` defaults to 1/sqrt(D). ``deterministic=None``
    follows torch.use_deterministic_algorithms. Pairs are dropped with probability ``dropout_p``, which ones by
    torch's generator for q's device. With ``return_lse`` the result is ``(out, lse)``. The output
    is contiguous (in ``bshd``). Inputs whose last stride is not 1 are copied. Autocast casts q, k and v.

    With ``sequences``, a ``flashgen.Sequences``, q, k and v have no batch dimension: their rows are those of all
    sequences, one behind another, and ``lse`` is ``(H, total_q)``. To mask and score, b is the sequence.
    """
    if layout not in _LAYOUTS:
        raise ArgumentError(f"layout={layout!r} is unknown; use 'bshd' or 'bhsd'")
    if layout == "bhsd":
        names = ("batch, heads, length, dim" if sequences is None else "heads, total length, dim").split(", ")
        q, k, v = _swapped("q", q, names), _swapped("k", k, names), _swapped("v", v, names)
    if sequences is not None:
        check_sequences(sequences)
    if score is None and (mask is None or (isinstance(mask, Mask) and mask.rest is None)):
        limits = NO_LIMITS if mask is None else limits_of(mask)
        out, lse = attend(q, k, v, limits, scale, deterministic, dropout_p, sequences)
    elif torch.compiler.is_compiling():
        out, lse = _attend_compiled(q, k, v, mask, score, scale, deterministic, dropout_p, sequences)
    else:
        program, captured = program_of(mask_of(mask), score_of(score))
        out, lse = attend_program(q, k, v, program, captured, scale, deterministic, dropout_p, sequences)
    if layout == "bhsd":
        out = out.transpose(-3, -2)
    return (out, lse) if return_lse else out


def attend(
    q: Any,
    k: Any,
    v: Any,
    what: What,
    scale: float | None,
    deterministic: bool | None,
    dropout_p: float = 0.0,
    sequences: Sequences | None = None,
    state: Any = None,
) -> tuple[Any, Any]:
    """``(out, lse)`` through the short door where nobody watches, else through the dispatcher.

    ``state`` decides which pairs are dropped; it is drawn where none is given.
    """
    given, rules = (q, k, v, *arrays_of(sequences)), (what, scale, longest_of(sequences))
    gradients = wants_gradients(q, k, v)
    if not gradients and dropout_p == 0.0:
        found = again(given, rules)
        if found is not None:
            return found[0], found[1]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling() or is_watched(q, k, v):
        if sequences is not None or isinstance(what, str):
            text = what if isinstance(what, str) else compiled.text(None, None, *[compiled.constant(n) for n in what])
            return by_operator(q, k, v, (), text, scale, deterministic, dropout_p, sequences, state)
        state = drawn_state(dropout_p, q, state)
        result: tuple[Any, Any] = torch.ops.flashgen.forward(q, k, v, scale, *what, deterministic, dropout_p, state)
        return result
    q, k, v = _ready(q, k, v)
    packed = sequences is not None
    dropout = None if dropout_p == 0.0 else dropout_of(dropout_p, drawn_state(dropout_p, q, state))
    drops = dropout is not None
    kernel = kernel_for(q, v, what, gradients=gradients, deterministic=deterministic, drops=drops, packed=packed)
    if gradients:
        results: tuple[Any, Any] = attention_function(q, k, v, (kernel, scale, dropout, sequences))
        return results
    return _attend(kernel, q, k, v, scale, dropout, sequences, {}, (given, rules))


def attend_program(
    q: Any,
    k: Any,
    v: Any,
    program: Program,
    captured: tuple[Any, ...],
    scale: float | None,
    deterministic: bool | None,
    dropout_p: float = 0.0,
    sequences: Sequences | None = None,
    state: Any = None,
) -> tuple[Any, Any]:
    """The same for a mask or a score that is an expression, with the tensors that it captured."""
    if not captured:
        return attend(q, k, v, program.text, scale, deterministic, dropout_p, sequences, state)
    given = (q, k, v, *captured, *arrays_of(sequences))
    rules = program.text, scale, longest_of(sequences), len(captured)
    gradients = wants_gradients(q, k, v, *captured)
    if not gradients and dropout_p == 0.0:
        found = again(given, rules)
        if found is not None:
            return found[0], found[1]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    watched = is_watched(q, k, v)
    check_tensors(program.names, captured, q.device)
    if watched or any(type(tensor) not in _PLAIN for tensor in captured):
        return by_operator(q, k, v, captured, program.text, scale, deterministic, dropout_p, sequences, state)
    q, k, v = _ready(q, k, v)
    packed = sequences is not None
    dropout = None if dropout_p == 0.0 else dropout_of(dropout_p, drawn_state(dropout_p, q, state))
    drops = dropout is not None
    options = {"gradients": gradients, "deterministic": deterministic, "drops": drops, "packed": packed}
    kernel = kernel_for(q, v, program.text, **options)
    if gradients:
        how = kernel, scale, dropout, sequences
        results: tuple[Any, Any] = program_function(q, k, v, how, program.names, *captured)
        return results
    named = dict(zip(program.names, captured, strict=True))
    return _attend(kernel, q, k, v, scale, dropout, sequences, named, (given, rules))


def _attend(
    kernel: Kernel,
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    dropout: Dropout | None,
    sequences: Sequences | None,
    captured: dict[str, Any],
    asked: tuple[Any, Any],
) -> tuple[Any, Any]:
    """``(out, lse)`` without gradients, remembered for calls that ask the same and drop nothing."""
    found = kernel.executor.find_forward(q, k, v, scale, None, captured, dropout, sequences)
    made = run(found, q)
    # What was cast is cast anew each time, and the emulator looks at where packed sequences begin.
    if dropout is None and q is asked[0][0] and (sequences is None or not kernel.target.on_host):
        remember(*asked, [(found, made)])
    return made[0], made[1]


def _attend_compiled(
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
    """What torch.compile follows: the program's text is a constant of the graph, and captured tensors are inputs."""
    if not (mask is None or isinstance(mask, Mask)) or not (score is None or isinstance(score, Score)):
        raise ArgumentError(
            "torch.compile cannot look into a mask or score function; make a flashgen.Mask.of(function) or "
            "flashgen.Score.of(function) outside of the compiled function, and pass that"
        )
    mask_form: Any = None if mask is None else mask.form
    score_form: Any = None if score is None else score.form
    limits = NO_LIMITS if mask is None or mask_form is not None else limits_of(mask)
    tensors: list[Any] = []
    if mask is not None and mask.rest is not None:
        tensors += [mask.rest.tensors[name] for name in compiled.mask_names(mask_form)]
    if score is not None:
        tensors += [score.traced.tensors[name] for name in compiled.score_names(score_form)]
        if score.sink is not None:
            tensors += [score.sink.tensors[name] for name in compiled.sink_names(score_form)]
    captured = [tensors[i] for i in compiled.order(mask_form, score_form, *limits)]
    text = compiled.text(mask_form, score_form, *limits)
    return by_operator(q, k, v, captured, text, scale, deterministic, dropout_p, sequences)


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
        result = torch.ops.flashgen.program_forward(q, k, v, *program)
    else:
        longest = sequences.max_seqlen_q, sequences.max_seqlen_k
        result = torch.ops.flashgen.varlen_forward(q, k, v, *arrays_of(sequences), *longest, *program)
    return result


def _ready(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Tensors as the kernels take them: cast by autocast, rows without gaps."""
    # That of CUDA is the one asked for without a name, which takes a third of the time.
    if torch.is_autocast_enabled() if q.is_cuda else torch.is_autocast_enabled("cpu"):
        q, k, v = ops.autocast(q, k, v)
    try:
        if q.stride()[-1] != 1 or k.stride()[-1] != 1 or v.stride()[-1] != 1:
            q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    except IndexError:
        shapes = ", ".join(f"{name} has shape {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ArgumentError(f"{shapes}; each must have 4 dimensions: (batch, length, heads, dim)") from None
    return q, k, v


def _swapped(name: str, x: Any, dimensions: list[str]) -> Any:
    if not isinstance(x, torch.Tensor) or x.ndim != len(dimensions):
        shape = f" of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else ""
        raise ArgumentError(f"{name} is a {type(x).__qualname__}{shape}; pass a torch.Tensor ({', '.join(dimensions)})")
    return x.transpose(-3, -2)


def is_watched(q: Any, k: Any, v: Any) -> bool:
    """Whether a subclass, a dispatch mode or a function transform must see the call as an operator."""
    if type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN:
        return _dispatch_modes() > 0 or _transforms() is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a torch.Tensor")
    return True
