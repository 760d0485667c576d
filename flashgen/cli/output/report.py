"""What ``flashgen build`` found, for a person and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashgen.cli.commands.builder import BuiltAttention, BuiltKernel, Files
from flashgen.cli.output import talk
from flashgen.cli.output.outputs import COLUMNS as OUTPUT_COLUMNS
from flashgen.cli.output.outputs import rows
from flashgen.plan.algorithm import describe_algorithm
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

if TYPE_CHECKING:
    from rich.console import Console

    from flashgen.cli.gpu.verification import Verification
    from flashgen.spec import AttentionSpec

SCHEMA = 2
LABEL_WIDTH = 10
COLUMNS = ("kernel", "tile", "stages", "warps", "registers", "spills", "shared", "occupancy", "compile")


def as_json(
    spec: AttentionSpec, built: Sequence[BuiltAttention], files: Files, verification: Verification | None
) -> dict[str, Any]:
    """The object that ``--json`` prints, and that lies beside the files as ``manifest.json``."""
    from flashgen.spec.text.files import spec_to_dict

    return {
        "schema": SCHEMA,
        "spec": spec_to_dict(spec),
        "kernels": [_kernel_json(kernel, files) for attention in built for kernel in attention.kernels],
        "verify": verification.as_json() if verification is not None else None,
    }


def _kernel_json(kernel: BuiltKernel, files: Files) -> dict[str, Any]:
    source, cubin = files.path(kernel, ".cu"), files.path(kernel, ".cubin")
    return {
        "name": kernel.plan.name,
        "pass": kernel.plan.pass_,
        "arch": kernel.plan.arch.name,
        "algorithm": kernel.plan.algorithm,
        "source": str(source) if source else None,
        "cubin": str(cubin) if cubin else None,
        "registers": kernel.binary.resources.registers,
        "spill_bytes": kernel.binary.resources.spill_bytes,
        "smem_bytes": smem_bytes(kernel),
        "compile_seconds": round(kernel.binary.compile_seconds, 6),
        "cached": kernel.cached,
    }


def smem_bytes(kernel: BuiltKernel) -> int:
    """Shared memory of one block: what the launch asks for and what the kernel declares itself."""
    return kernel.plan.smem.bytes + kernel.binary.resources.static_smem_bytes


def print_report(
    spec: AttentionSpec,
    built: Sequence[BuiltAttention],
    files: Files,
    verification: Verification | None,
    *,
    asked: bool = True,
) -> None:
    """Spec, plan, compile time, resources, files and verification."""
    console = talk.stdout()
    _line(console, "spec", spec.describe())
    for attention in built:
        _line(console, "plan", describe_arch(attention.plan))
        _line(console, "", describe_algorithm(attention.plan.forward))
        if attention.plan.tuning is not None:
            _line(console, "", attention.plan.tuning.headline)
        if attention.plan.has("main"):
            _line(console, "", f"backward: {describe_algorithm(attention.plan.kernel('main'))}")
        talk.print_rows(_kernel_rows(attention), LABEL_WIDTH, {COLUMNS[0]: "dim"})
    if files.directory is not None:
        _line(console, "files", str(files.directory))
        for attention in built:
            for kernel in attention.kernels:
                _line(console, "", f"{kernel.plan.name}.{{cu,cubin}}")
    unverified = "no, stderr says why" if asked else "no (--no-verify)"
    verdict = verification.describe() if verification else unverified
    _line(console, "verified", verdict, _verified_style(verification))
    if verification is not None:
        talk.print_rows(rows(verification.outputs), LABEL_WIDTH, {OUTPUT_COLUMNS[0]: "dim"})


def describe_arch(plan: AttentionPlan) -> str:
    """The architecture and a GPU that has it."""
    return f"{plan.arch.name} ({plan.arch.example})"


def describe_tiles(kernel: KernelPlan) -> tuple[str, str, str]:
    """Tile, stages and warps of one kernel."""
    values = {member.name: member.value for member in kernel.config}
    warps = str(kernel.threads // 32)
    if kernel.role == "forward":
        if "consumers" in values:
            warps += " specialized"
        elif "split_k" in values:
            warps += " split_k" if values["split_k"] else " split_q"
    if kernel.fixed_blocks is not None:
        return "-", "-", warps
    if "tile_kv" not in values:
        return f"{kernel.grid_tile} row{'s' if kernel.grid_tile != 1 else ''}", "-", warps
    return f"{values.get('tile_q')}x{values.get('tile_kv')}", str(kernel.stages or "-"), warps


def _kernel_rows(attention: BuiltAttention) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for kernel in attention.kernels:
        resources = kernel.binary.resources
        seconds = f"{kernel.binary.compile_seconds:.2f} s"
        rows.append(
            (
                kernel.plan.role,
                *describe_tiles(kernel.plan),
                _registers(kernel),
                f"{resources.spill_bytes} B",
                _kib(smem_bytes(kernel)),
                _occupancy(kernel),
                f"{seconds} (cached)" if kernel.cached else seconds,
            )
        )
    return rows


def _registers(kernel: BuiltKernel) -> str:
    """What each thread has: from the start, or once producers have handed theirs to consumers."""
    values = {member.name: member.value for member in kernel.plan.config}
    if "consumer_registers" not in values:
        return str(kernel.binary.resources.registers)
    return f"{values['producer_registers']}, {values['consumer_registers']}"


def _occupancy(kernel: BuiltKernel) -> str:
    from flashgen.compile import occupancy

    found = occupancy(kernel.plan, kernel.binary.resources)
    return f"{found.fraction:.0%}, {found.blocks}/SM ({found.limited_by})"


def _kib(size: int) -> str:
    return f"{size / 1024:.1f} KiB" if size else "0"


def _line(console: Console, label: str, value: str, style: str | None = None) -> None:
    from rich.text import Text

    console.print(Text(f"{label:<{LABEL_WIDTH}}", style="bold") + Text(value, style or ""), soft_wrap=True)


def _verified_style(verification: Verification | None) -> str:
    if verification is None:
        return "yellow"
    return "green" if verification.ok else "red"
