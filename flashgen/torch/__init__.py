"""flashgen for torch: ``attention`` with autograd, and the dispatcher ops ``torch.ops.flashgen.*``.

Two paths lead to the same kernels. Eager calls on plain tensors take the short one, an ``autograd.Function``.
Whatever rewrites or records torch programs (torch.compile, export, dispatch modes, tensor subclasses, vmap)
goes through the ops, which have shapes, gradients, autocast and flop counts registered.
"""

from __future__ import annotations

from flashgen.torch.entry import attention
from flashgen.torch.kernels import emulate_cpu
from flashgen.torch.operators import vmap as _vmap  # noqa: F401  (it registers itself)
from flashgen.torch.operators.attention import SAC_SAVE
from flashgen.torch.sdpa.enable import enable_sdpa

__all__ = ["SAC_SAVE", "attention", "emulate_cpu", "enable_sdpa"]
