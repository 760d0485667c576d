"""Other libraries' function names over flashgen's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.common.lazy import lazy_names

if TYPE_CHECKING:
    from flashgen.compat import flash_attn, flash_attn_interface
else:
    __getattr__, __dir__ = lazy_names(__name__, {}, modules=("flash_attn", "flash_attn_interface"))

__all__ = ["flash_attn", "flash_attn_interface"]
