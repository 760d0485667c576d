"""``flashgen build``'s work: kernels rendered, compiled (or found in the cache) and written to files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.cli.exits import UsageError
from flashgen.cli.output import talk
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

if TYPE_CHECKING:
    from flashgen.arch import Arch
    from flashgen.cache import Cache
    from flashgen.compile import Binary
    from flashgen.render import KernelSource
    from flashgen.spec import AttentionSpec, Schedule


#: Builds without ``--out`` whose files are kept; older ones are one command away.
BUILDS_KEPT = 64


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """One kernel: its plan, its text and its cubin."""

    source: KernelSource
    binary: Binary
    cached: bool

    @property
    def plan(self) -> KernelPlan:
        """The plan it was rendered from."""
        return self.source.plan


@dataclass(frozen=True, slots=True)
class BuiltAttention:
    """All kernels of a spec for one architecture."""

    plan: AttentionPlan
    kernels: tuple[BuiltKernel, ...]


@dataclass(frozen=True, slots=True)
class Files:
    """Where the files of a build lie; no directory when they could not be written."""

    directory: Path | None
    paths: dict[tuple[str, str], Path] = field(default_factory=dict)

    def path(self, kernel: BuiltKernel, suffix: str) -> Path | None:
        """The file of a kernel with that suffix."""
        return self.paths.get((kernel.plan.name, suffix))


def plan_all(spec: AttentionSpec, schedule: Schedule | None, archs: Iterable[Arch]) -> tuple[AttentionPlan, ...]:
    """The plans of a spec, one for each architecture."""
    from flashgen.plan import plan
    from flashgen.render.override import unused_overrides

    plans = tuple(plan(spec, schedule, arch) for arch in archs)
    if message := unused_overrides(plans):
        raise UsageError(message)
    return plans


def build_all(plans: Iterable[AttentionPlan], cache: Cache) -> tuple[BuiltAttention, ...]:
    """Compile every kernel of every plan, saying on stderr which one is in work."""
    return tuple(build_attention(plan, cache) for plan in plans)


def build_attention(plan: AttentionPlan, cache: Cache) -> BuiltAttention:
    """Render and compile all kernels of a plan, or of what takes its place if there are too few registers for it."""
    from flashgen.making import with_registers
    from flashgen.sources import sources_of

    def build(plan: AttentionPlan) -> BuiltAttention:
        sources = sources_of(plan)
        return BuiltAttention(plan, tuple(build_kernel(sources[k.role], cache) for k in plan.kernels))

    def refused(plan: AttentionPlan) -> None:
        forward = plan.kernel("forward")
        tiles = f"tiles of {forward.constant('tile_kv')} keys"
        talk.warn(f"{forward.algorithm} with {tiles} has too few registers here; trying another")

    return with_registers(plan, build, refused)


def build_kernel(source: KernelSource, cache: Cache) -> BuiltKernel:
    """Compile one kernel, unless the cache has it."""
    from flashgen.compile import compile_source, compiler_build_id, spill_warning

    def compile_aloud(source: KernelSource) -> Binary:
        with talk.working(f"compiling {source.name}"):
            return compile_source(source)

    binary, cached = cache.get_or_compile(source, compile_aloud)
    if warning := spill_warning(source.plan, binary.resources, compiler_build_id()):
        talk.warn(warning)
    return BuiltKernel(source, binary, cached)


def write_files(built: Sequence[BuiltAttention], out: Path | None, cache_root: Path) -> Files:
    """Write each kernel's ``.cu`` and ``.cubin`` to ``out``, or to a directory beside the cache."""
    kernels = [kernel for attention in built for kernel in attention.kernels]
    directory = out.absolute() if out is not None else builds_in(cache_root) / _digest(kernels)[:12]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if out is None:
            _keep_newest(directory.parent)
        paths = {}
        for kernel in kernels:
            for suffix, data in ((".cu", kernel.source.text.encode()), (".cubin", kernel.binary.image)):
                path = directory / f"{kernel.plan.name}{suffix}"
                _replace(path, data)
                paths[kernel.plan.name, suffix] = path
        return Files(directory, paths)
    except OSError as error:
        if out is not None:
            raise UsageError(f"--out {out} cannot be written ({error}); name a directory that can") from None
        talk.warn(f"source and cubin were not written ({error}); name a directory with --out DIR")
        return Files(None)


def write_manifest(files: Files, manifest: Mapping[str, Any]) -> None:
    """Write what was built beside the files, last: who finds it finds everything."""
    if files.directory is not None:
        text = json.dumps(manifest, indent=2, allow_nan=False) + "\n"
        _replace(files.directory / "manifest.json", text.encode())


def builds_in(cache_root: Path) -> Path:
    """Where builds without ``--out`` leave their files: copies to be read, never loaded from."""
    return cache_root / "builds"


def _keep_newest(builds: Path) -> None:
    directories = sorted(builds.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in directories[BUILDS_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _digest(kernels: Iterable[BuiltKernel]) -> str:
    digest = hashlib.sha256(usedforsecurity=False)
    for kernel in kernels:
        digest.update(kernel.source.digest.encode())
        digest.update(kernel.binary.image)
    return digest.hexdigest()
