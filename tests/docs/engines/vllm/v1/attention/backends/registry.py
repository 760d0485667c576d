"""Where vLLM finds backends."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

C = TypeVar("C", bound=type)


class AttentionBackendEnum(Enum):
    CUSTOM = ""


def register_backend(backend: AttentionBackendEnum, class_path: str | None = None) -> Callable[[C], C]:
    return lambda cls: cls
