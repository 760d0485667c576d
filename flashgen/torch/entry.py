"""``attention``: what people call, and the choice between the two paths."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.kernel import Kernel
from flashgen.launch.call.batched_launch import run
from flashgen.spec import (
    Mask,
    Sequences,
    causal,
    chunked,
    dilated,
    full,
    global_tokens,
    softcap,
    window,
)
from flashgen.torch.function import (
    attention_function,
    over_batch,
    program_function,
    recorded_of,
    rows_contiguous,
    wants_gradients,
)
from flashgen.torch.kernels import NO_LIMITS, What, kernel_for
from flashgen.torch.operators import dense, programs, varlen  # noqa: F401  (they register themselves)
from flashgen.torch.operators.packed import arrays_of, check_sequences, longest_of
from flashgen.torch.options import check_dense, check_flags, number_of
from flashgen.torch.randomness import drawn_state, dropout_of
from flashgen.torch.replay import Asked, again, remember
from flashgen.torch.sdpa.mask_tensors import function_of
from flashgen.torch.tracing import compiled
from flashgen.torch.tracing.compiling import attend_compiled, by_operator
from flashgen.torch.tracing.program import Program, check_tensors, limits_of, mask_of, program_of, score_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LAYOUTS = ("bshd", "bhsd")
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack

_maker: Any
for _maker in (causal, full, window, chunked, dilated, global_tokens, softcap):
    # What torch.compiler.assume_constant_result sets, without loading the compiler: a mask or a score of numbers that
    # a compiled function makes is made while it is traced.
    _maker._dynamo_marked_constant = True


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
    change places, here and in the output. k and v may have batch 1 under any batch of q. ``mask`` is a Mask such
    as ``flashgen.causal()``, a function ``(b, h, q, k) -> condition``, a tensor of bools that broadcasts to
    ``(B, H, Sq, Sk)``, or None for all keys; ``score`` a Score such as ``flashgen.softcap(30.0)``, a function
    ``(s, b, h, q, k) -> number``, or None. Tensors that they capture are torch tensors on q's device;
    float tensors that the score captured get gradients. ``scale`` defaults to 1/sqrt(D). ``deterministic=None``
    follows torch.use_deterministic_algorithms. Pairs are dropped with probability ``dropout_p``, which ones by
    torch's generator for q's device. With ``return_lse`` the result is ``(out, lse)``. The output
    is contiguous (in ``bshd``). Inputs whose last stride is not 1 are copied. Autocast casts q, k and v.

    With ``sequences``, a ``flashgen.Sequences``, q, k and v have no batch dimension: their rows are those of all
    sequences, one behind another, and ``lse`` is ``(H, total_q)``. To mask and score, b is the sequence.
    """
    if type(dropout_p) is not float:
        dropout_p = number_of("dropout_p", dropout_p)
    if type(return_lse) is not bool:
        check_flags(return_lse=return_lse)
    if deterministic is not None and type(deterministic) is not bool:
        check_flags(deterministic=deterministic)
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ArgumentError(f"layout={show(layout)} is unknown; use 'bshd' or 'bhsd'")
    if layout == "bhsd":
        names = ("batch, heads, length, dim" if sequences is None else "heads, total length, dim").split(", ")
        q, k, v = _swapped("q", q, names), _swapped("k", k, names), _swapped("v", v, names)
    if sequences is not None:
        check_sequences(sequences)
    if isinstance(mask, torch.Tensor):
        mask = function_of(mask, q, k, sequences)
    if score is None and (mask is None or (isinstance(mask, Mask) and mask.rest is None)):
        limits = NO_LIMITS if mask is None else limits_of(mask)
        out, lse = attend(q, k, v, limits, scale, deterministic, dropout_p, sequences)
    elif torch.compiler.is_compiling():
        out, lse = attend_compiled(q, k, v, mask, score, scale, deterministic, dropout_p, sequences)
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
    asked: Asked | None = None,
) -> tuple[Any, Any]:
    """``(out, lse)`` by the short path where no compiler or dispatch mode is active, else through the dispatcher.

    ``state`` decides which pairs are dropped; it is drawn where none is given. ``asked`` is what the call is remembered
    by, where somebody looked already whether there was one like it.
    """
    if asked is None and dropout_p == 0.0:
        asked = (q, k, v, *arrays_of(sequences)), (what, scale, deterministic, longest_of(sequences))
        found = again(*asked)
        if found is not None:
            return found[0], found[1]
    check_dense(q=q, k=k, v=v)
    if sequences is None:
        k, v = over_batch(q, k), over_batch(q, v)
    if torch.compiler.is_compiling() or is_watched(q, k, v):
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if sequences is not None or isinstance(what, str):
            text = what if isinstance(what, str) else compiled.text_of_limits(*[compiled.constant(n) for n in what])
            return by_operator(q, k, v, (), text, scale, deterministic, dropout_p, sequences, state)
        state = drawn_state(dropout_p, q, state)
        result: tuple[Any, Any] = torch.ops.flashgen.forward(q, k, v, scale, *what, deterministic, dropout_p, state)
        return result
    return _attend(*_ready(q, k, v), what, {}, scale, deterministic, dropout_p, sequences, state, asked)


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
    asked: Asked | None = None,
) -> tuple[Any, Any]:
    """The same for a mask or a score that is an expression, with the tensors that it captured."""
    if not captured:
        return attend(q, k, v, program.text, scale, deterministic, dropout_p, sequences, state, asked)
    if asked is None and dropout_p == 0.0:
        rules = program.text, scale, deterministic, longest_of(sequences), len(captured)
        asked = (q, k, v, *captured, *arrays_of(sequences)), rules
        found = again(*asked)
        if found is not None:
            return found[0], found[1]
    check_dense(q=q, k=k, v=v)
    if sequences is None:
        k, v = over_batch(q, k), over_batch(q, v)
    watched = is_watched(q, k, v)
    check_tensors(program.names, captured, q.device)
    if watched or any(type(tensor) not in _PLAIN for tensor in captured):
        return by_operator(q, k, v, captured, program.text, scale, deterministic, dropout_p, sequences, state)
    named = dict(zip(program.names, captured, strict=True))
    return _attend(*_ready(q, k, v), program.text, named, scale, deterministic, dropout_p, sequences, state, asked)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    what: What,
    captured: dict[str, Any],
    scale: float | None,
    deterministic: bool | None,
    dropout_p: float,
    sequences: Sequences | None,
    state: Any,
    asked: Asked | None,
) -> tuple[Any, Any]:
    """``(out, lse)`` of tensors as kernels take them, remembered for calls that ask the same and drop nothing."""
    follows = torch.are_deterministic_algorithms_enabled() if deterministic is None else None
    reproducible = bool(follows if deterministic is None else deterministic)
    dropout = None if dropout_p == 0.0 else dropout_of(dropout_p, drawn_state(dropout_p, q, state))
    gradients = wants_gradients(q, k, v, *captured.values())
    drops, packed = dropout is not None, sequences is not None
    options = {"gradients": gradients, "deterministic": reproducible, "drops": drops, "packed": packed}
    kernel = kernel_for(q, v, what, **options)
    found = kernel.executor.find_forward(q, k, v, scale, None, captured, dropout, sequences)
    how = found, kernel, scale, dropout, arrays_of(sequences), longest_of(sequences)
    if asked is not None and not (packed and _looks_at_sequences(kernel)):
        recorded = recorded_of(asked[0], how, captured, follows) if gradients else None
        remember(*asked, [(found, ())], recorded=recorded)
    results: tuple[Any, Any]
    if not gradients:
        out, lse, *_ = run(found, q)
        results = out, lse
    elif captured:
        results = program_function(q, k, v, how, tuple(captured), *captured.values())
    else:
        results = attention_function(q, k, v, how)
    return results


def _looks_at_sequences(kernel: Kernel) -> bool:
    """Whether a kernel's calls look at where packed sequences begin each time: those on the emulator do."""
    return kernel.target.on_host


def _ready(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Tensors as the kernels take them: cast by autocast, rows without gaps."""
    # That of CUDA is the one asked for without a name, which takes a third of the time.
    if torch.is_autocast_enabled() if q.is_cuda else torch.is_autocast_enabled("cpu"):
        q, k, v = dense.autocast(q, k, v)
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
