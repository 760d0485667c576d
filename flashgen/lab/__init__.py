"""The laboratory: what teaches and measures. Nothing that builds or runs kernels imports it."""

from __future__ import annotations

from flashgen.common.lazy import listed_names

__getattr__, __dir__, __all__ = listed_names(__name__, __file__)
