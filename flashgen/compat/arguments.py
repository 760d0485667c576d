"""What the functions of both flash-attn generations take, as flashgen's own arguments."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.spec import Sequences
from flashgen.spec.sequences import LENGTH_LIMIT
from flashgen.torch.entry import attend
from flashgen.torch.options import Options, number_of
from flashgen.torch.packed import check_sequences
from flashgen.torch.program import Program
from flashgen.torch.replay import CallKey
from flashgen.torch.scales import NO_INPUT_SCALES, InputScales
from flashgen.torch.sdpa.forms import Form, program_for


def attention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    alibi_slopes: Any = None,
    attention_chunk: int = 0,
    dropout_p: float = 0.0,
    sequences: Sequences | None = None,
    rng_state: Any = None,
    key: CallKey | None = None,
    scales: InputScales = NO_INPUT_SCALES,
) -> tuple[Any, Any]:
    """``(out, lse)``; limits of a window that are -1 are none, and so are a cap and a chunk of 0."""
    limits = limits_of(causal, window_size)
    if type(softcap) is not float:
        softcap = number_of("softcap", softcap)
    chunk = chunk_of(attention_chunk)
    options = Options(scale, True if deterministic else None, dropout_p, sequences, rng_state)
    if softcap == 0.0 and alibi_slopes is None and chunk is None:
        return attend(q, k, v, Program((*limits, None, None)), (), options, key, scales)
    starts = None if sequences is None else sequences.cu_seqlens_q
    form, tensors = form_of(q, limits, softcap, alibi_slopes, attention_chunk, starts)
    return attend(q, k, v, *program_for(form, tensors), options, key, scales)


def form_of(
    q: Any,
    limits: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: Any,
    attention_chunk: int,
    starts: Any,
) -> tuple[Form, tuple[Any, ...]]:
    """The form of the mask and the score, and its tensors; ``starts`` says where packed queries begin."""
    chunk, cap = chunk_of(attention_chunk), cap_of(softcap)
    if alibi_slopes is None:
        return Form(*limits, chunk, None, (), cap), ()
    return Form(*limits, chunk, None, (), cap, _slopes(alibi_slopes, q, starts)), (alibi_slopes,)


def sequences_of(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> Sequences:
    """Sequences that lie behind one another."""
    max_seqlen_q, max_seqlen_k = whole(max_seqlen_q), whole(max_seqlen_k)
    if torch.compiler.is_compiling():
        # The compiler may know no number yet, but this of it.
        for longest in (max_seqlen_q, max_seqlen_k):
            torch._check(longest >= 0)
            torch._check(longest < LENGTH_LIMIT)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    check_sequences(sequences)
    return sequences


def whole(value: Any) -> Any:
    """A whole number of another library as Python's; what is none is for others to refuse."""
    try:
        return value if isinstance(value, int) else index(value)
    except TypeError:
        return value


def check_tensors(**given: Any) -> None:
    """ArgumentError for what is none of torch's."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a torch.Tensor")


def unpack(name: str, packed: Any, count: int, rows: str = "batch, length") -> Any:
    """The tensors in one ``(*rows, count, heads, head_dim)``."""
    check_tensors(**{name: packed})
    if packed.dim() != rows.count(",") + 4 or packed.shape[-3] != count:
        raise ArgumentError(f"{name} has shape {tuple(packed.shape)}; it must be ({rows}, {count}, heads, head_dim)")
    # unbind, not indexing: its gradient is one stack instead of padded sums.
    return packed.unbind(-3)


def limits_of(causal: bool, window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """How far a query sees; a causal mask has no keys to the right, whatever the window says."""
    try:
        left, right = window_size
        # Numbers of other libraries too, which flash-attn takes.
        left, right = (left, right) if isinstance(left, int) and isinstance(right, int) else (index(left), index(right))
        is_known = left >= -1 and right >= -1
    except (TypeError, ValueError):
        is_known = False
    if not is_known:
        raise ArgumentError(f"window_size={show(window_size)} must be two whole numbers >= 0, or -1 for no limit")
    open_right = None if right == -1 else right
    return None if left == -1 else left, 0 if causal else open_right


def cap_of(softcap: float) -> str | None:
    """The limit of ``tanh``, as forms have it."""
    if type(softcap) is not float:
        softcap = number_of("softcap", softcap)
    if softcap == 0.0:
        return None
    if not softcap > 0.0:
        raise ArgumentError(f"softcap={softcap!r} is not a limit for logits; pass a positive number, or 0.0 for none")
    return float(softcap).hex()


def chunk_of(attention_chunk: int) -> int | None:
    """The length of a chunk; None for no chunks."""
    if isinstance(attention_chunk, bool) or not isinstance(attention_chunk, int) or attention_chunk < 0:
        raise ArgumentError(
            f"attention_chunk={show(attention_chunk)} is not a length; pass a whole number, or 0 for none"
        )
    return attention_chunk or None


def _slopes(slopes: Any, q: Any, starts: Any) -> tuple[Any, int]:
    check_tensors(q=q, alibi_slopes=slopes)
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    heads = q.shape[-2]
    shape = tuple(slopes.shape)
    if shape not in ((heads,), (batch, heads)):
        raise ArgumentError(f"alibi_slopes has shape {shape}; it must be {(heads,)} or {(batch, heads)}")
    return slopes.dtype, len(shape)
