"""The kernel cache: each kernel compiles once per machine, and disk faults never reach the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.cache.cache import Cache, default_cache
from flashgen.cache.key import cache_key
from flashgen.common.lazy import lazy_names

if TYPE_CHECKING:
    from flashgen.cache.report import BadFile, CacheInfo, CacheReport
else:
    # What the cache says about itself, for people; a build asks nothing of the kind.
    __getattr__, __dir__ = lazy_names(__name__, {"flashgen.cache.report": ("BadFile", "CacheInfo", "CacheReport")})

__all__ = ["BadFile", "Cache", "CacheInfo", "CacheReport", "cache_key", "default_cache"]
