"""flashgen: a compiler from a Python spec of an attention kernel to CUDA C++ that can be read.

``__init__.pyi`` lists the public names. They load on first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from flashgen.common.lazy import listed_names
from flashgen.common.version import __version__ as __version__

__getattr__, __dir__, __all__ = listed_names(__name__, __file__)
