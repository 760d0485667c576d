"""flashgen inside other libraries, through their own extension points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.common.lazy import lazy_names

if TYPE_CHECKING:
    from flashgen.integrations import transformers
else:
    __getattr__, __dir__ = lazy_names(__name__, {}, modules=("transformers",))

__all__ = ["transformers"]
