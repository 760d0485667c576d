"""The one Jinja environment, and the steps from a template to the lines of a source."""

from __future__ import annotations

import traceback
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    TemplateError,
    TemplateSyntaxError,
    Undefined,
)

from flashgen.errors import CompileError
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import paths
from flashgen.render.amalgamation.amalgamate import Line, amalgamate
from flashgen.render.amalgamation.contents import contents, with_sections
from flashgen.render.amalgamation.marks import LineMarks, read_marks
from flashgen.render.amalgamation.prune import prune
from flashgen.render.layout import align_comments, camel, declared_together, trailing_comment
from flashgen.render.literals import literal
from flashgen.render.source import Origin
from flashgen.render.summary import summary


def rendered_lines(plan: KernelPlan, *, everything: bool = False) -> list[Line]:
    """The lines of the source of a plan, each with the template line it came from.

    ``everything`` also prints what the kernel does not reach, for tests of the difference.
    """
    name = f"kernels/{plan.template}"
    try:
        marked = environment(paths.templates_dir()).get_template(name).render(plan=plan)
    except (TemplateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _template_error(name, error) from error
    lines = amalgamate(read_marks(marked, name))
    lines = list(lines if everything else prune(lines))
    while lines and not lines[-1][0]:
        lines.pop()
    top = len(list(takewhile(lambda line: line[0].startswith("//") and line[1].file.startswith("kernels/"), lines)))
    if not top:
        return lines
    code = with_sections(lines[top:])
    table = contents(top, [text for text, _ in code])
    return [*lines[:top], *((text, Origin(name, 1)) for text in table), *code]


@lru_cache(maxsize=4)
def environment(directory: Path) -> Environment:
    """The environment over a templates directory; templates see ``plan`` and the filters below, no more."""
    env = Environment(
        loader=FileSystemLoader(directory),
        extensions=[LineMarks],
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        # Folding constants takes longer than rendering, which is done once.
        optimized=False,
    )
    env.globals.clear()
    env.globals["range"] = range
    env.filters.update(
        literal=literal,
        camel=camel,
        trailing_comment=trailing_comment,
        align_comments=align_comments,
        declared_together=declared_together,
        summary=summary,
        expression_code=_expression_code,
        captured_code=_captured_code,
    )
    return env


def _expression_code(plan: KernelPlan) -> object:
    # Imported on use, like what the next one takes: most kernels print neither, and a first build waits for it.
    from flashgen.render.expressions import expression_code

    return expression_code(plan)


def _captured_code(plan: KernelPlan) -> object:
    from flashgen.render.captured import captured_code

    return captured_code(plan)


def _finalize(value: object) -> str:
    if isinstance(value, Undefined):
        # Strict: turning it into text raises the error that names it.
        return str(value)
    return literal(value)


def _template_error(template: str, error: Exception) -> CompileError:
    """The error with the template line that caused it, and that line's text."""
    origin = _origin_of(template, error)
    message = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    place = f"{origin.file}:{origin.line}" if origin.line else origin.file
    return CompileError(f"{place}: {message}", paths.quoted(origin))


def _origin_of(template: str, error: Exception) -> Origin:
    if isinstance(error, TemplateSyntaxError):
        return Origin(error.name or template, error.lineno)
    root = paths.templates_dir()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if frame.lineno and path.is_relative_to(root):
            return Origin(path.relative_to(root).as_posix(), frame.lineno)
    return Origin(template, 0)
