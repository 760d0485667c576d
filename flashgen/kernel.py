"""``Kernel``: a built spec, to be called, looked at and saved."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import pipeline
from flashgen.arch import Arch
from flashgen.common.checks import checked_mapping, is_whole
from flashgen.common.html import markup, table
from flashgen.common.show import show
from flashgen.errors import ArgumentError, EmulationError, LaunchError
from flashgen.launch.call.fixed_sizes import Sizes, check_sizes, fixed_sizes
from flashgen.launch.variant import Variant
from flashgen.pipeline import TargetName
from flashgen.plan.fallbacks import for_alignment
from flashgen.plan.model.plans import AttentionPlan, Role
from flashgen.spec import AttentionSpec, Dropout, KVCache, Rotary, Schedule, Sequences

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary, Resources
    from flashgen.launch.executor import Executor
    from flashgen.launch.quantizer import Quantized
    from flashgen.launch.target import Target


class Kernel:
    """A built spec: call it, inspect it, or save it. Many threads may call it at once."""

    def __init__(
        self,
        variant: Variant,
        target: TargetName,
        *,
        base: Kernel | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan: AttentionPlan = variant.plan
        self._base = base
        self._tensors: Mapping[str, Any] = tensors or {}
        self._variant = variant
        self._target_name: TargetName = target
        self._executor_made: Executor | None = None
        self._making = threading.Lock()

    def with_tensors(self, tensors: Mapping[str, Any]) -> Kernel:
        """The same kernel for calls that use these captured tensors unless they name others."""
        return Kernel(self._variant, self._target_name, base=self._base or self, tensors=tensors)

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the kernel."""
        return self.plan.spec.with_tensors(self._tensors) if self._tensors else self.plan.spec

    @property
    def schedule(self) -> Schedule:
        """The schedule, completed by the plan."""
        return self.plan.schedule

    @property
    def arch(self) -> Arch:
        """The architecture that the kernel was built for."""
        return self.plan.arch

    @property
    def source(self) -> dict[Role, str]:
        """The CUDA C++ of each kernel."""
        return {role: kernel.source.text for role, kernel in self._variant.kernels.items()}

    @property
    def binaries(self) -> dict[Role, Binary]:
        """The compiled kernels; empty for the emulator. Kernels of captured gradients compile on first use."""
        return {role: k.binary for role, k in self._variant.kernels.items() if k.binary is not None}

    @property
    def report(self) -> dict[Role, Resources]:
        """Registers, spills and shared memory of each compiled kernel.

        For the emulator, this compiles the same source for a GPU of this architecture on first use.
        """
        if self._target_name == "emulator":
            sources = {r: k.source for r, k in self._variant.kernels.items() if k.plan.captured is None}
            return {role: binary.resources for role, binary in pipeline.binaries(sources).items()}
        return {role: binary.resources for role, binary in self.binaries.items()}

    def _repr_html_(self) -> str:
        heads, *rows = self.plan.table
        binaries = self.binaries
        registers = [str(binaries[k.role].resources.registers) if k.role in binaries else "" for k in self.plan.kernels]
        cells = [(*row, number) for row, number in zip(rows, registers, strict=True)]
        return markup(table((*heads, "registers"), cells, f"{self.plan.title}, on the {self._target_name}"))

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        stream: Any = None,
        captured: Mapping[str, Any] | None = None,
        dropout: Dropout | None = None,
        sequences: Sequences | None = None,
        cache: KVCache | None = None,
        return_p: bool = False,
        qv: Any = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> tuple[Any, ...]:
        """``(out, lse)``: out ``(B, Sq, H, Dv)`` in the spec's dtype, lse ``(B, H, Sq)`` float32 (natural).

        q is ``(B, Sq, H, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``, any strides whose last one is 1.
        Runs on the arguments' device and on their library's current stream; ``stream`` is for arrays of
        libraries other than torch and CuPy. ``captured`` gives tensors of the mask and the score by name, in
        place of those that the spec was made with. A spec with dropout=True needs ``dropout``, and one with
        varlen=True ``sequences``; the backward call takes the same. A spec with a cache needs ``cache``, and then k and
        v are that cache. No gradients are recorded. A spec with qv=True needs ``qv`` ``(B, Sq, H, Dv)``; k and v
        may be views of one buffer.

        Elements of 8-bit q, k and v are multiplied by ``q_scale``, ``k_scale`` and ``v_scale``: each is a positive
        number, a float32 array of shape (), (1,), (heads,) or (batch, heads), or None for 1. With ``scale_block=B`` an
        array is (batch, heads, ceil(length / B)), and of packed sequences (heads, total // B + batch): block j of
        sequence i is number ``cu_seqlens[i] // B + i + j``. Out has the spec's ``out_dtype``.

        ``return_p=True`` adds a third result, the probabilities P ``(B, H, Sq, Sk)`` in the spec's dtype, before
        dropout; only kernels of ``algorithm="standard"`` have it.
        """
        if return_p is not False:
            _check_flag("return_p", return_p)
        if self._tensors:
            captured = self._with_defaults(captured)
        executor = self._executor_made or self._executor()
        if q_scale is None and k_scale is None and v_scale is None:
            return executor.forward(q, k, v, scale, stream, captured, dropout, sequences, cache, return_p, qv)
        scales = q_scale, k_scale, v_scale
        return executor.forward(q, k, v, scale, stream, captured, dropout, sequences, cache, return_p, qv, scales)

    def append(
        self,
        k_cache: Any,
        v_cache: Any,
        k: Any,
        v: Any,
        *,
        cache: KVCache,
        q: Any = None,
        rotary: Rotary | None = None,
        stream: Any = None,
    ) -> Any:
        """Appends k and v to a cache, in place; keys and values that do not fit are left out.

        k and v are ``(B, Snew, Hk, D)`` and ``(B, Snew, Hk, Dv)``, in the spec's dtype. For an 8-bit cache they are
        divided by the ``k_scale`` and ``v_scale`` of ``cache``, and rounded. ``rotary`` rotates k and q by
        their positions; the rotated q is a new array, which is returned. Without ``rotary``, q itself is returned.
        Pass ``appended=Snew`` in the ``cache`` of the call that attends to them.
        """
        if not self.plan.spec.cache:
            raise LaunchError("this kernel was built without a cache; build one with cache='contiguous' or 'paged'")
        return self.executor.append(k_cache, v_cache, k, v, cache, q, rotary, stream)

    def quantize(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        rotate: bool = True,
        sequences: Sequences | None = None,
        stream: Any = None,
    ) -> Quantized:
        """q, k and v in e4m3 with their scales, for the call: ``(q, k, v, q_scale, k_scale, v_scale)``.

        They come in the spec's ``out_dtype``, with any strides whose last one is 1, packed if the spec says so. Blocks
        of ``scale_block`` rows share a scale. With ``rotate``, q and k are multiplied by the same orthogonal matrix: it
        spreads outliers over the head, and logits stay as they are. NaN and infinity become NaN.
        """
        quantizer = self.executor.quantize
        if quantizer is None:
            raise LaunchError("this kernel was built without blocks of scales; build one with scale_block=128 or 64")
        return quantizer(q, k, v, rotate, sequences, stream)

    def backward(
        self,
        do: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        scale: float | None = None,
        stream: Any = None,
        captured: Mapping[str, Any] | None = None,
        captured_gradients: bool = False,
        dlse: Any = None,
        dropout: Dropout | None = None,
        sequences: Sequences | None = None,
        p: Any = None,
    ) -> tuple[Any, ...]:
        """``(dq, dk, dv)`` for the gradient ``do`` of ``out``; out and lse are the forward call's.

        ``dlse`` is the gradient of ``lse``, float32 and contiguous like it, for a loss that depends on it.
        With ``captured_gradients=True`` a fourth result maps the name of every captured float tensor to its
        gradient, of the tensor's own shape and dtype and bitwise reproducible. ``p`` is what a forward call with
        ``return_p=True`` returned; without it a kernel of ``algorithm="standard"`` computes P again.
        """
        _check_flag("captured_gradients", captured_gradients)
        if self._tensors:
            captured = self._with_defaults(captured)
        more = captured, captured_gradients, dlse, dropout, sequences, p
        return self.executor.backward(do, q, k, v, out, lse, scale, stream, *more)

    def _with_defaults(self, captured: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The captured tensors of a call: those given, and those that the spec was made with."""
        given = checked_mapping(captured)
        if not given:
            return self._tensors
        check_sizes(self._fixed_sizes, given)
        return {**self._tensors, **given}

    @functools.cached_property
    def _fixed_sizes(self) -> Sizes:
        return fixed_sizes(self.spec)

    def warmup(
        self,
        device: int | None = None,
        *,
        access_bytes: int | Iterable[int] | None = None,
        captured_gradients: bool = False,
    ) -> Kernel:
        """Compiles and loads what calls would otherwise load on first use; needed before graph capture.

        ``device`` is a CUDA ordinal (default: the current one). ``access_bytes`` names alignments below the
        default that unaligned views will need; ``captured_gradients=True`` includes the kernels for those gradients.
        """
        _check_flag("captured_gradients", captured_gradients)
        if device is not None:
            self._check_device(device)
        executor = self._executor()
        if self._target_name == "emulator":
            device = -1
        elif device is None:
            from flashgen.launch.driver.cuda import current_device

            device = current_device()
        for access in _alignments(access_bytes):
            executor.variants.load(device, access, captured_gradients)
        return self

    def _check_device(self, device: object) -> None:
        if self._target_name == "emulator":
            raise ArgumentError(f"device={show(device)} does not go with the emulator, which has none; leave it out")
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise ArgumentError(f"device={show(device)} is no CUDA ordinal; use 0 for the first GPU, or leave it out")

    def save(self, directory: str | Path) -> Path:
        """Writes each kernel's ``.cu`` and ``.cubin`` and a ``manifest.json``; returns the directory."""
        from flashgen.manifest import save

        kernels = {role: kernel.compiled() for role, kernel in self._variant.kernels.items()}
        return save(self.plan, kernels, Path(directory))

    @property
    def executor(self) -> Executor:
        """What finds and runs the calls."""
        return self._executor_made or self._executor()

    @property
    def target(self) -> Target:
        """Where calls run."""
        return self.executor.target

    def _executor(self) -> Executor:
        if self._executor_made is None and self._base is not None:
            self._executor_made = self._base._executor()
        if self._executor_made is None:
            from flashgen.launch.executor import Executor
            from flashgen.plan import workspaces

            with self._making:
                if self._executor_made is None:
                    target = _make_target(self._target_name)
                    self._executor_made = Executor(self._variant, self._realigned, target, workspaces)
        return self._executor_made

    def _realigned(self, access_bytes: int) -> Variant:
        """The kernels for less aligned arguments."""
        return pipeline.variant(for_alignment(self.plan, access_bytes), self._target_name)

    def __repr__(self) -> str:
        return f"Kernel({self.spec.describe()}, {self.arch.name}, target={self._target_name!r})"


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={show(value)} is not a bool; use True or False")


def _alignments(asked: object) -> tuple[int | None, ...]:
    """One alignment or several, each in bytes."""
    if asked is None:
        return (None,)
    try:
        wanted = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    except Exception:  # whatever an __iter__ of someone else's raises
        wanted = (asked,)
    for access in wanted:
        if not is_whole(access, 2, 16) or access not in (2, 4, 8, 16):
            raise LaunchError(f"access_bytes={show(access)} is not supported; use 2, 4, 8 or 16")
    return wanted


def _make_target(name: TargetName) -> Target:
    if name == "gpu":
        from flashgen.launch.gpu import GpuTarget

        return GpuTarget()
    from flashgen.launch.host import HostTarget

    try:
        from flashgen import emulator
    except ImportError as error:
        raise EmulationError(f"the emulator is not available ({error}); build with target='gpu'") from error
    return HostTarget(functools.partial(emulator.load, race=None), emulator.GuardedCall)
