"""The sources of a plan, rendered once per machine: a warm build does without the template engine.

A text is kept under a digest of all it depends on: the plan, every template and header, and the code that
plans and renders. The entry is an ordinary one of the kernel cache, checksummed like a cubin.

Widths of bands and captured numbers come with each call, so they are no part of that digest. Only the comment at
the top names them; where they differ from those that the kept text was rendered with, that comment is made anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from flashgen import settings
from flashgen.cache import default_cache
from flashgen.compile.binary import Binary, Resources
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Role
from flashgen.render import KernelSource, render, templates_dir
from flashgen.render.source import code_of

_KIND = "rendered sources"
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
#: The code that a text depends on, its plan given: what rendering imports, errors and settings aside.
RENDERING_CODE = ("arch", "common", "dtypes.py", "expr", "plan", "render", "spec")


def sources_of(
    plan: AttentionPlan, meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext
) -> dict[Role, KernelSource]:
    """The source of every kernel of the plan, by role; what has to be rendered is rendered inside ``meanwhile()``."""
    if settings.override_dir() is not None:
        # A kernel author's edits must show at once, and are not ours to keep.
        return _rendered(plan)
    digest = rendering_digest()

    def make() -> Binary:
        with meanwhile():
            return _packed(plan, digest)

    try:
        # No compiler made it, so none is named.
        entry, _ = default_cache().obtain(_key(plan, digest), make, build_id="")
    except _ChangedMeanwhileError:
        return _rendered(plan)
    values, texts, codes = _kept(entry.image)
    if values == _values(plan):
        return {kernel.role: KernelSource(kernel, texts[kernel.role]) for kernel in plan.kernels}
    return {kernel.role: _Retitled(kernel, codes[kernel.role]) for kernel in plan.kernels}


def rendering_digest() -> str:
    """A digest of the templates and headers as they are now, and of the code as this process found it."""
    return f"{_templates_digest()} {_code_digest()}"


class _ChangedMeanwhileError(Exception):
    """Somebody edits templates or code while this process runs; nothing may be kept under an old digest."""


def _rendered(plan: AttentionPlan) -> dict[Role, KernelSource]:
    return {kernel.role: render(kernel) for kernel in plan.kernels}


def _packed(plan: AttentionPlan, digest: str) -> Binary:
    kept = {"values": _values(plan), "texts": {role: source.text for role, source in _rendered(plan).items()}}
    # Afterwards, because rendering imports on demand what a digest from before may not have seen.
    if f"{_templates_digest()} {_code_digest.__wrapped__()}" != digest:
        raise _ChangedMeanwhileError
    name = f"{plan.kernels[0].name} and its kin"
    return Binary(name, plan.arch.name, json.dumps(kept).encode(), Resources(0, 0, 0, 0), 0.0, "", kind="sources")


def _key(plan: AttentionPlan, digest: str) -> str:
    text = json.dumps([_KIND, digest, _plain(dataclasses.replace(plan, tuning=None), {})], sort_keys=True)
    return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()


def canonical(value: Any) -> Any:
    """A spec, or another part of a plan, as nested lists that say everything about it."""
    return _plain(value, {})


def _values(plan: AttentionPlan) -> str:
    """The numbers of the spec that its kernels do not depend on."""
    mask = plan.spec.mask
    bands = [(band.left, band.right) for band in (mask.bottom_right, mask.top_left)]
    return repr((bands, sorted(plan.spec.scalars.items())))


@lru_cache(maxsize=64)
def _kept(image: bytes) -> tuple[str, dict[Role, str], dict[Role, str]]:
    """An entry's numbers, its texts, and their code: one object for all specs that share it."""
    kept = json.loads(image)
    texts = kept["texts"]
    return kept["values"], texts, {role: code_of(text) for role, text in texts.items()}


class _Retitled(KernelSource):
    """Code under the comment for its own plan, which is made when somebody reads it: calls with numbers that change
    from step to step make a source for each, and nobody looks."""

    __slots__ = ("_code",)
    _code: str

    def __init__(self, plan: KernelPlan, code: str) -> None:
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "_code", code)

    @property
    def text(self) -> str:
        """The comment and the code."""
        from flashgen.render.amalgamation.contents import contents
        from flashgen.render.summary import header

        top = header(self.plan)
        table = contents(top.count("\n"), self._code.split("\n"))
        return top + "".join(f"{line}\n" for line in table) + self._code

    @property
    def code(self) -> str:
        """The text below the comment at its top."""
        return self._code


def _plain(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """A plan as nested lists that say everything about it, in an order that no hash seed changes.

    ``known`` are the parts with a form of their own that were met before, which kernels share: the spec, expressions.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "plain"):
        if id(value) not in known:
            # Kept alive, for else another one could get its number.
            known[id(value)] = value, [type(value).__name__, _plain(value.plain(), known)]
        return known[id(value)][1]
    if dataclasses.is_dataclass(value):
        names = value.__dataclass_fields__
        return [type(value).__name__, *[_plain(getattr(value, name), known) for name in names]]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item, known) for item in value]
    raise TypeError(f"a plan holds a {type(value).__qualname__}, which has no canonical text")


def _templates_digest() -> str:
    return _digest_of(str(templates_dir()), ("include", "kernels"))


@lru_cache(maxsize=1)
def _code_digest() -> str:
    return _digest_of(_PACKAGE, RENDERING_CODE)


def _digest_of(root: str, names: tuple[str, ...]) -> str:
    """Of contents, not of times: an installer may give every release's files the same time."""
    digest = hashlib.sha256(usedforsecurity=False)
    for name in names:
        for path in _files_below(os.path.join(root, name)):
            try:
                with open(path, "rb", buffering=0) as file:
                    data = file.read()
            except OSError:
                # An editor's lock or temporary file: gone again, or a link to nowhere.
                continue
            digest.update(b"%s %d\n" % (os.fsencode(path[len(root) :]), len(data)))
            digest.update(data)
    return digest.hexdigest()


def _files_below(path: str) -> Iterator[str]:
    try:
        with os.scandir(path) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError:
        yield path
        return
    for entry in entries:
        if not entry.is_dir():
            yield entry.path
        elif entry.name != "__pycache__":
            yield from _files_below(entry.path)
