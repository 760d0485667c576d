"""Overrides for kernel authors: an edited source in FLASHGEN_OVERRIDE_DIR replaces the rendered one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from flashgen import settings
from flashgen.errors import CompileError
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

#: File names that one message lists.
_LISTED = 8


def overridden(plan: KernelPlan) -> str | None:
    """The author's text for a plan; None without one."""
    directory = settings.override_dir()
    if directory is None:
        return None
    path = _file(directory, plan)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"the override {path} cannot be read ({error}); mend or remove it") from None
    if not text.strip():
        # The shell creates an empty file for `flashgen show ... > file` before flashgen starts.
        raise CompileError(f"the override {path} is empty; unset FLASHGEN_OVERRIDE_DIR to get the rendered source")
    # Imported when there is something to say: without an override nothing is logged.
    import logging

    logging.getLogger("flashgen").info("%s: source taken from %s", plan.name, path)
    return text


def unused_overrides(plans: Sequence[AttentionPlan], fallbacks: Iterable[AttentionPlan] = ()) -> str | None:
    """A sentence if FLASHGEN_OVERRIDE_DIR is set and holds no kernel of these plans or their fallbacks, else None.

    A misspelled file name would otherwise run the kernel that its author wanted to replace.
    """
    directory = settings.override_dir()
    if directory is None:
        return None
    kernels = [kernel for plan in (*plans, *fallbacks) for kernel in plan.kernels]
    if any(_file(directory, kernel).exists() for kernel in kernels):
        return None
    searched = list(dict.fromkeys(_file(directory, kernel).name for kernel in kernels))
    held = sorted(path.name for path in directory.glob("*.cu"))
    archs = " and ".join(plan.arch.name for plan in plans)
    return (
        f"FLASHGEN_OVERRIDE_DIR={str(directory)!r} replaces no kernel of {plans[0].spec.describe()} for "
        f"{archs}: flashgen looked for {_listed(searched)}, and the directory holds "
        f"{_listed(held) or 'no .cu file'}; name a file after one of these kernels, build for the "
        "architecture in the file's name, or unset the variable"
    )


def _file(directory: Path, kernel: KernelPlan) -> Path:
    return directory / f"{kernel.name}.cu"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
