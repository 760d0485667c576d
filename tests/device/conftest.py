"""Makes the package ``conformance`` importable: it serves these tests and the script ``record.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
