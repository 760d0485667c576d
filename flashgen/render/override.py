"""The back door for kernel authors: an edited source in FLASHGEN_OVERRIDE_DIR replaces the rendered one."""

from __future__ import annotations

from flashgen import settings
from flashgen.errors import CompileError
from flashgen.plan.model import KernelPlan


def overridden(plan: KernelPlan) -> str | None:
    """The author's text for a plan; None without one."""
    directory = settings.override_dir()
    if directory is None:
        return None
    path = directory / f"{plan.name}.cu"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"the override {path} cannot be read ({error}); mend or remove it") from None
    # Imported when there is something to say: without an override nothing is logged.
    import logging

    logging.getLogger("flashgen").info("%s: source taken from %s", plan.name, path)
    return text
