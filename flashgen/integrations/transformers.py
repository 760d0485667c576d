"""transformers: after ``register()``, a model made with ``attn_implementation="fgen"`` attends by flashgen.

transformers asks an implementation for two functions. The one that makes masks returns what is cheapest to make and to
look up: None where the attention function knows all from its other arguments, one number per key where only padding
or documents are to be added to that, and else the mask of all pairs. The other one attends.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from flashgen.errors import ArgumentError
from flashgen.integrations.fixed_caches import attend_to_fixed, is_lengths, lengths_of, whole_mask
from flashgen.integrations.paged import OPTIONS, PagedCall, accept, attend_to_pages, is_paged
from flashgen.spec import Sequences
from flashgen.torch.entry import attend
from flashgen.torch.options import Options
from flashgen.torch.program import Program
from flashgen.torch.sdpa.forms import Form, axes_of, program_for

#: Names with "flash" in them mean kernels of transformers' own hub.
NAME = "fgen"
#: Options that say nothing of how to attend. All others are refused unless they are None or False.
_HARMLESS = frozenset(
    [
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    ]
)


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation=name`` known to transformers; call it once, before models are made."""
    if "flash" in name:
        raise ArgumentError(
            f"name={name!r} holds 'flash', which transformers takes for kernels of its hub; use {NAME!r}"
        )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
    accept(name)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> Any:
    """What ``attention`` is given as its ``attention_mask``.

    None, or per key a bool (may be attended to) or an integer (its document), leave causality and windows to
    the layer. With four dimensions, of which some may be 1, it is the whole mask, or the lengths in a cache of fixed
    size.
    """
    whole = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    if mask_function is masking_utils.bidirectional_mask_function:
        # The layer may believe that it is causal, so None would be misunderstood.
        return _padding(attention_mask, batch_size, kv_length, kv_offset, options.get("device"))[:, None, None]
    documents, known = None, mask_function is masking_utils.causal_mask_function
    if not known and not torch.compiler.is_compiling():  # which does not look into functions
        documents, inner = _documents(mask_function)
        known = inner is masking_utils.causal_mask_function or _is_sliding(inner, options.get("local_size"))
    # A cache of fixed size has more keys than there are tokens, and counts these on the GPU. It has no gradients.
    is_fixed = isinstance(q_offset, torch.Tensor) and isinstance(kv_offset, int) and kv_offset == 0
    if is_fixed and mask_function is masking_utils.causal_mask_function and not torch.is_grad_enabled():
        lengths = lengths_of(batch_size, q_offset + q_length, attention_mask)
        if lengths is not None:
            return lengths
    in_step = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    if not (known and in_step) or (documents is not None and attention_mask is not None):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size, mask_function=mask_function, attention_mask=attention_mask, **whole, **options
        )
    if documents is not None:
        return documents.int()
    if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
        return None
    return _padding(attention_mask, batch_size, kv_length, kv_offset, options.get("device"))


def _padding(attention_mask: Any, batch: int, keys: int, offset: int, device: Any) -> Any:
    """Which keys exist, (batch, keys)."""
    if attention_mask is None:
        return torch.ones((batch, keys), dtype=torch.bool, device=device)
    missing = keys + offset - attention_mask.shape[-1]
    return torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))[:, offset : offset + keys]


def _documents(mask_function: Any) -> tuple[Any, Any]:
    """Which document each token of packed ones belongs to, and the mask within documents; else None, and the mask.

    Positions within a document differ as those of the whole row do, so what holds of these is no other mask.
    """
    parts = _parts(masking_utils.and_masks, mask_function).get("mask_functions", ())
    for part, other in (parts, parts[::-1]) if len(parts) == 2 else ():
        packed = _parts(masking_utils.packed_sequence_mask_function, part)
        if packed:
            # Earlier releases take positions as they are.
            remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
            within = {} if remap is None else _parts(remap, other)
            return packed["packed_sequence_mask"], within.get("mask_function", other)
    return None, mask_function


def _is_sliding(mask_function: Any, size: int | None) -> bool:
    """Whether it is a causal mask within a window of the size, which layers receive as well."""
    parts = _parts(masking_utils.and_masks, mask_function).get("mask_functions", ())
    return (
        len(parts) == 2
        and _parts(masking_utils.sliding_window_overlay, parts[0]) == {"sliding_window": size}
        and parts[1] is masking_utils.causal_mask_function
    )


def _parts(maker: Any, function: Any) -> dict[str, Any]:
    """What a function made by ``maker`` captured, by name; nothing if another made it."""
    code = getattr(function, "__code__", None)
    if code is None or code not in maker.__code__.co_consts:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)}


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """``(out, None)``: query is (batch, heads, length, head_dim), out (batch, length, heads, head_dim)."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if is_paged(options):
        _check_options({name: value for name, value in options.items() if name not in OPTIONS})
        left, right = _limits(causal, sliding_window, key.shape[2])
        call = PagedCall(scaling, *_program(left, right, softcap, s_aux))
        options |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        options |= {"max_length_q": max_length_q, "max_length_k": max_length_k}
        return attend_to_pages(module, query, key, value, options, call), None
    _check_options(options)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask, packed = attention_mask, None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        where = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        packed, mask = _packed(query, attention_mask, position_bias, *where), None
        q, k, v = q[0], k[0], v[0]
    if is_lengths(mask):
        if position_bias is None and dropout == 0.0 and q.dtype == k.dtype:
            left, right = _limits(causal, sliding_window, key.shape[2])
            program, given = _program(left, right, softcap, s_aux)
            return attend_to_fixed(q, k, v, mask, program, given, scaling), None
        mask = whole_mask(mask, q.shape[1], k.shape[1])
    if mask is not None and mask.shape[-1] != k.shape[1]:
        raise ArgumentError(
            f"attention_mask has {mask.shape[-1]} keys and key has {k.shape[1]}; make the mask for the cache in use"
        )
    limits = _limits(causal, sliding_window, key.shape[2]) if mask is None or mask.dim() != 4 else (None, None)
    out = _attend(q, k, v, mask, limits, position_bias, softcap, s_aux, Options(scaling, None, dropout, packed))
    return out if packed is None else out[None], None


def _attend(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    limits: tuple[int | None, int | None],
    position_bias: Any,
    softcap: float | None,
    s_aux: Any,
    options: Options,
) -> Any:
    """The output for keys that are all there; with a mask of pairs there are no limits."""
    biases = [
        x for x in (position_bias, mask if mask is not None and mask.is_floating_point() else None) if x is not None
    ]
    if mask is not None and mask.is_floating_point():
        mask = None
    if mask is None and not biases and softcap is None and s_aux is None:
        return attend(q, k, v, Program((*limits, None, None)), (), options)[0]
    sizes = 1 if q.dim() == 3 else q.shape[0], q.shape[-2], q.shape[-3], k.shape[-3]
    form = Form(
        *limits,
        mask=None if mask is None else (mask.dtype, axes_of(mask, sizes)),
        biases=tuple((bias.dtype, axes_of(bias, sizes)) for bias in biases),
        softcap=_cap(softcap),
        sink=None if s_aux is None else s_aux.dtype,
    )
    given = [x for x in (mask, *biases, s_aux) if x is not None]
    return attend(q, k, v, *program_for(form, given), options)[0]


def _program(left: int | None, right: int | None, softcap: float | None, s_aux: Any) -> tuple[Program, Any]:
    """The program of limits, a cap and sinks, and its tensors."""
    form = Form(left, right, softcap=_cap(softcap), sink=None if s_aux is None else s_aux.dtype)
    return program_for(form, () if s_aux is None else (s_aux,))


def _cap(softcap: float | None) -> str | None:
    return None if softcap is None else float(softcap).hex()


def _check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ArgumentError(
                f"{name}={value!r:.60} is not supported by attn_implementation={NAME!r}; leave it out, or use 'eager'"
            )


def _limits(causal: bool, sliding_window: int | None, keys: int) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query attends to."""
    if sliding_window is None:
        return None, 0 if causal else None
    if causal:
        return sliding_window - 1, 0
    if keys > sliding_window:
        raise ArgumentError(
            f"sliding_window={sliding_window} without a causal mask means different things in different models; "
            "pass the mask as attention_mask of four dimensions"
        )
    return None, None


def _packed(
    query: Any, mask: Any, position_bias: Any, starts_q: Any, starts_k: Any, longest_q: Any, longest_k: Any
) -> Sequences:
    """Sequences in one row, of which a mask may say no more than that again: which document each token is of."""
    says_documents = mask is not None and mask.dim() == 2 and not mask.is_floating_point() and mask.dtype != torch.bool
    whole = None not in (longest_q, longest_k) and starts_q is not None and starts_k is not None
    if not whole or query.shape[0] != 1 or not (mask is None or says_documents):
        raise ArgumentError(
            "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k go together, with a batch of 1 and without "
            "attention_mask; pass position_ids that start at 0 for each document instead"
        )
    if position_bias is not None:
        raise ArgumentError("position_bias is not supported with cu_seq_lens_q; pass position_ids instead")
    return Sequences(starts_q.int(), starts_k.int(), longest_q, longest_k)
