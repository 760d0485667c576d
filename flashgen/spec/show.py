"""``show``, under its former name."""

from __future__ import annotations

from flashgen.show import show as show
