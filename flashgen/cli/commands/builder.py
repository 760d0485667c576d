"""``flashgen build``'s work: kernels rendered, compiled (or found in the cache) and written to files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import pipeline
from flashgen.cli.exits import UsageError
from flashgen.cli.output import talk
from flashgen.pipeline import Observer
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

if TYPE_CHECKING:
    from flashgen.arch import Arch
    from flashgen.cli.gpu.arrays import Gpu
    from flashgen.cli.request import Request
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


class Narrator(Observer):
    """Says on stderr what a build does, and notes what it compiles."""

    def __init__(self) -> None:
        self._compiled: set[str] = set()

    def unused_overrides(self, message: str) -> None:
        """A command builds one spec, so an override that no kernel uses is a mistake."""
        raise UsageError(message)

    def tuned(self, message: str) -> None:
        """Says that a tuned schedule is used."""
        talk.say(f"{message} (FLASHGEN_TUNED=0 turns this off)")

    def compiling(self, source: KernelSource) -> AbstractContextManager[object]:
        """Says which kernel is being compiled."""
        return talk.working(f"compiling {source.name}")

    def compiled(self, source: KernelSource) -> None:
        """Notes that the cache did not have this kernel."""
        self._compiled.add(source.code)

    def refused(self, attention: AttentionPlan) -> None:
        """Says which plan has too few registers."""
        forward = attention.forward
        tiles = f"tiles of {forward.constant('tile_kv')} keys"
        talk.warn(f"{forward.algorithm} with {tiles} has too few registers here; trying another")

    def built(self, source: KernelSource, binary: Binary) -> BuiltKernel:
        """A kernel of this build. Says if it spills registers."""
        from flashgen.compile import compiler_build_id, spill_warning

        if warning := spill_warning(source.plan, binary.resources, compiler_build_id()):
            talk.warn(warning)
        return BuiltKernel(source, binary, source.code not in self._compiled)


def plan_all(
    spec: AttentionSpec, schedule: Schedule | None, archs: Iterable[Arch], gpu: Gpu | None = None
) -> tuple[AttentionPlan, ...]:
    """The plans of a spec, one for each architecture; those for a GPU by a schedule that was tuned there."""
    return pipeline.plans(spec, schedule, archs, Narrator(), gpu=None if gpu is None else lambda: gpu.name)


def check_decode(request: Request, plans: Iterable[AttentionPlan]) -> None:
    """A UsageError if decode kernels are asked for, and a plan has none."""
    for plan in plans if request.decode else ():
        if not plan.has("decode"):
            raise UsageError(
                f"--decode: there is no decode kernel for {plan.spec.describe()} on {plan.arch.name}; use bf16 or "
                "fp16, no options of the schedule, and a GPU from sm_80"
            )


def build_all(plans: Iterable[AttentionPlan]) -> tuple[BuiltAttention, ...]:
    """Compile every kernel of every plan, or of its first fallback with enough registers."""
    return tuple(_build(plan) for plan in plans)


def _build(plan: AttentionPlan) -> BuiltAttention:
    narrator = Narrator()
    variant = pipeline.variant(plan, observer=narrator)
    kernels = [kernel.compiled() for kernel in variant.kernels.values()]
    return BuiltAttention(variant.plan, tuple(narrator.built(kernel.source, kernel.binary) for kernel in kernels))


def build_kernel(source: KernelSource) -> BuiltKernel:
    """Compile one kernel, unless the cache has it."""
    narrator = Narrator()
    (binary,) = pipeline.binaries({source.plan.role: source}, narrator).values()
    return narrator.built(source, binary)


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
