"""The table of tuned schedules: for each spec and GPU the fastest that was found there, kept on disk.

    <cache directory>/tuned/entries/<key>.entry

Entries are those of the kernel cache: checksummed, published whole, and read only if nobody else could have written
them. The key names the spec, the GPU, the compiler's build, and flashgen's code and templates. So a schedule counts
only for the kernels that it was verified and timed with. Emptying the kernel cache leaves the table as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flashgen import settings
from flashgen.cache import Cache
from flashgen.common.version import __version__
from flashgen.compile.binary import Binary, Resources
from flashgen.plan.model.tuning import Tuning
from flashgen.sources import canonical, rendering_digest
from flashgen.spec import AttentionSpec

_KIND = "tuned"
#: Raise it when the text of an entry changes.
_LAYOUT = 1

_tables: dict[Path, Cache] = {}


def recall(spec: AttentionSpec, gpu: Callable[[], str]) -> Tuning | None:
    """What was found for a spec on a GPU, by its name; None if nothing was, or FLASHGEN_TUNED=0."""
    root = _root()
    # Without a table, as on most machines, neither the GPU nor the compiler is asked.
    if root is None or not root.is_dir() or not settings.use_tuned():
        return None
    found = _table(root).get(_key(spec, gpu()))
    return None if found is None else _decoded(found.image)


def remember(spec: AttentionSpec, tuning: Tuning) -> bool:
    """Keeps what was found, also for the forward pass alone; whether the disk took it."""
    root = _root()
    if root is None:
        return False
    import msgspec

    from flashgen.compile import compiler_build_id

    for each in _directions(spec):
        key = _key(each, tuning.gpu)
        image = msgspec.json.encode({"layout": _LAYOUT, "tuning": tuning})
        entry = Binary(spec.describe(), tuning.gpu, image, Resources(0, 0, 0, 0), 0.0, "", kind=_KIND)
        _table(root).put(key, entry, compiler_build_id())
    return root.is_dir()


def forget(spec: AttentionSpec, gpu: str) -> bool:
    """Removes what was found; whether there was anything."""
    root = _root()
    if root is None or not root.is_dir():
        return False
    return sum(_table(root).remove(_key(each, gpu)) for each in _directions(spec)) > 0


def _directions(spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """A spec, and the same forward only: its forward kernel is the same."""
    return tuple(dict.fromkeys((spec, replace(spec, direction="forward"))))


def _decoded(image: bytes) -> Tuning | None:
    import msgspec

    from flashgen.errors import SpecError

    try:
        value = json.loads(image)
        if value["layout"] != _LAYOUT:
            return None
        return msgspec.convert(value["tuning"], Tuning)
    except (ValueError, KeyError, TypeError, SpecError, msgspec.MsgspecError):
        # Another version wrote this entry, so it counts as missing.
        return None


def _root() -> Path | None:
    try:
        return settings.cache_dir() / "tuned"
    except RuntimeError:
        # No home directory.
        return None


def _table(root: Path) -> Cache:
    return _tables.get(root) or _tables.setdefault(root, Cache(root))


def _key(spec: AttentionSpec, gpu: str) -> str:
    from flashgen.compile import compiler_build_id

    # Widths of bands and captured numbers are no part of a kernel, but its time depends on them.
    bands = [(band.left, band.right) for band in (spec.mask.bottom_right, spec.mask.top_left)]
    numbers = repr((bands, sorted(spec.scalars.items())))
    parts = [_KIND, __version__, canonical(spec), numbers, gpu, compiler_build_id(), rendering_digest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
