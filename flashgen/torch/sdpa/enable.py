"""``enable_sdpa``: torch's own ``scaled_dot_product_attention``, computed by flashgen where it applies.

torch has a registry of implementations of its flash attention operators. Activating one puts other functions
under these operators; ``F.scaled_dot_product_attention``, torch.compile and ring attention call them as before.
``F.scaled_dot_product_attention`` is overridden as well, for what these operators have no arguments for.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import torch

from flashgen.errors import ArgumentError, PlanError
from flashgen.torch.kernels import forward_kernel, is_emulating, kernel_for
from flashgen.torch.program import FULL, Program
from flashgen.torch.sdpa.function import DTYPES, LARGEST_HEAD, TOP_LEFT, scaled_dot_product_attention
from flashgen.torch.sdpa.switch import Switch
from flashgen.torch.tensors import rows_contiguous

_NAME = "flashgen"
_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = _FORWARD + "_backward"
_FUNCTION = "scaled_dot_product_attention"
_BOTTOM_RIGHT = Program((None, 0, None, None))


def enable_sdpa() -> Switch:
    """Has ``F.scaled_dot_product_attention`` use flashgen, until the result's ``remove()`` or ``with`` ends.

    flashgen takes the place of torch's flash attention, which comes first among torch's backends meanwhile. It also
    takes masks given as tensors, dropout and float32. torch's own kernels compute everything else: other dtypes,
    head dims above 256, nested tensors, function transforms, and calls where flash attention is disabled.
    """
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):
        raise ArgumentError(
            f"torch {torch.__version__} cannot take an SDPA implementation back; use torch 2.11 or later"
        )
    before = attention.current_flash_attention_impl()
    if before == _NAME:
        return Switch(lambda: None)
    if _NAME not in attention.list_flash_attention_impls():
        attention.register_flash_attention_impl(_NAME, register_fn=_Overrides)
    attention.activate_flash_attention_impl(_NAME)
    settings = contextlib.ExitStack()
    settings.enter_context(_flash_first())
    settings.enter_context(_compiled_apart())

    def take_back() -> None:
        settings.close()
        if attention.current_flash_attention_impl() == _NAME:
            attention.restore_flash_attention_impl()
            if before is not None:
                attention.activate_flash_attention_impl(before)

    return Switch(take_back)


def _flash_first() -> Any:
    """The backends that are enabled, in torch's order but for flash attention, which is first."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return sdpa_kernel([backend for backend, is_on in enabled.items() if is_on], set_priority=True)


def _compiled_apart() -> Any:
    """Keeps torch.compile's caches on disk apart: their keys do not say what F.scaled_dot_product_attention calls."""
    config: Any = importlib.import_module("torch.compiler.config")
    return config.patch(cache_key_tag=f"{config.cache_key_tag}+{_NAME}")


class _Overrides:
    """The functions under torch's operators, for as long as torch keeps this."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        self._override(_FORWARD, "CUDA", _Flash.forward)
        self._override(_BACKWARD, "CUDA", _Flash.backward)
        # A composite function is the same for all keys, of which one that names a device finds it.
        self._override(_FUNCTION, "CompositeImplicitAutograd", scaled_dot_product_attention, under="CPU")
        if is_emulating():
            # torch itself has no kernel here; ring attention calls these on any device.
            self._override(_FORWARD, "CPU", _Flash.forward)
            self._override(_BACKWARD, "CPU", _Flash.backward)
            self._override(_FORWARD + "_for_cpu", "CPU", _FlashForCpu.forward)
            self._override(_FORWARD + "_for_cpu_backward", "CPU", _FlashForCpu.backward)

    def _override(self, name: str, key: str, function: Any, under: str | None = None) -> None:
        # Calling the operator again instead would come back here.
        shadowed = _kernel_under(f"aten::{name}", under or key)

        def with_shadowed(keys: Any, *arguments: Any, **options: Any) -> Any:
            def otherwise() -> Any:
                if shadowed is None:
                    raise ArgumentError(
                        f"{name} was called with what flashgen does not do, and torch has no kernel of its own for "
                        f"{key}; leave out dropout, and use float16, bfloat16 or float32"
                    )
                return shadowed.call_boxed(keys, *arguments, **options)

            return function(otherwise, *arguments, **options)

        with warnings.catch_warnings():
            # That a kernel is overridden is the point.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            self._library.impl(name, with_shadowed, key, with_keyset=True)

    def remove(self) -> None:
        """Puts torch's own kernels back."""
        self._library = None


def _kernel_under(name: str, key: str) -> Any:
    """torch's own kernel of an operator; None where this build of torch has none."""
    try:
        return torch.library.get_kernel(name, key)
    except RuntimeError:
        return None


def _applies(q: Any, k: Any, v: Any, dropout_p: float) -> bool:
    """Whether flashgen computes this: the same for both passes, since either takes up the other's log-sum-exp."""
    return (
        dropout_p == 0.0
        and q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.dim() == k.dim() == v.dim() == 4
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD
        and (q.is_cuda or is_emulating())
    )


def _attend(q: Any, k: Any, v: Any, program: Program, scale: float | None) -> tuple[Any, Any] | None:
    """``(out, lse)``, out with heads first; None where no kernel can be planned."""
    rows = [rows_contiguous(x.transpose(1, 2)) for x in (q, k, v)]
    try:
        kernel = forward_kernel(rows[0], rows[2], program, deterministic=torch.are_deterministic_algorithms_enabled())
    except PlanError:
        return None
    out, lse = kernel(*rows, scale=scale)
    return _laid_out_like(q, out.transpose(1, 2)), lse


def _differentiate(
    do: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, program: Program, scale: float | None
) -> tuple[Any, Any, Any] | None:
    """``(dq, dk, dv)`` with heads first; None where no kernel can be planned."""
    q, k, v, out, do = (rows_contiguous(x.transpose(1, 2)) for x in (q, k, v, out, do))
    try:
        deterministic = torch.are_deterministic_algorithms_enabled()
        kernel = kernel_for(q, v, program, gradients=True, deterministic=deterministic)
    except PlanError:
        return None
    dq, dk, dv = kernel.backward(do, q, k, v, out, lse.contiguous(), scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _laid_out_like(x: Any, result: Any) -> Any:
    """The result with the strides that torch's shape functions promise: those of a new tensor like ``x``."""
    promised = torch.empty_like(x, device="meta").stride()
    return result if result.stride() == promised else torch.empty_like(x).copy_(result)


class _Flash:
    """``_scaled_dot_product_flash_attention`` and its backward, causal ones aligned bottom-right."""

    @staticmethod
    def forward(
        otherwise: Any,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        if return_debug_mask or not _applies(query, key, value, dropout_p):
            return otherwise()
        found = _attend(query, key, value, _BOTTOM_RIGHT if is_causal else FULL, scale)
        if found is None:
            return otherwise()
        out, lse = found
        seed, offset = (query.new_zeros(shape, dtype=torch.uint64) for shape in ((2,), ()))
        return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)

    @staticmethod
    def backward(
        otherwise: Any,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Any,
        philox_offset: Any,
        *,
        scale: float | None = None,
    ) -> Any:
        if not _applies(query, key, value, dropout_p):
            return otherwise()
        program = _BOTTOM_RIGHT if is_causal else FULL
        found = _differentiate(grad_out, query, key, value, out, logsumexp, program, scale)
        if found is None:
            return otherwise()
        return tuple(_laid_out_like(x, dx) for x, dx in zip((query, key, value), found, strict=True))


class _FlashForCpu:
    """``_scaled_dot_product_flash_attention_for_cpu`` and its backward, causal ones aligned top-left."""

    @staticmethod
    def forward(
        otherwise: Any,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> Any:
        if attn_mask is not None or not _applies(query, key, value, dropout_p):
            return otherwise()
        found = _attend(query, key, value, TOP_LEFT if is_causal else FULL, scale)
        if found is None:
            return otherwise()
        out, lse = found
        return out, lse.transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def backward(
        otherwise: Any,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> Any:
        if attn_mask is not None or not _applies(query, key, value, dropout_p):
            return otherwise()
        program = TOP_LEFT if is_causal else FULL
        found = _differentiate(grad_out, query, key, value, out, logsumexp, program, scale)
        return otherwise() if found is None else found
