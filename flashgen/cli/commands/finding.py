"""What one check of ``flashgen doctor`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis. ``broken`` keeps flashgen from working; ``missing`` costs a feature."""

    subject: str
    status: Status
    detail: str
    remedy: str = ""
