"""Facts per GPU generation, one row each; nothing else in the project knows a shared-memory size."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.common.show import show
from flashgen.errors import PlanError


@dataclass(frozen=True, slots=True)
class Arch:
    """What a plan must know of a GPU generation."""

    name: str
    #: The numeric compute capability, 10 * major + minor.
    capability: int
    #: Shared memory one block may ask for (opt-in maximum), and one multiprocessor has, in bytes.
    max_smem_per_block: int
    smem_per_multiprocessor: int
    max_threads_per_multiprocessor: int
    max_blocks_per_multiprocessor: int
    #: Asynchronous global-to-shared copies (cp.async).
    has_cp_async: bool
    #: An instruction that converts 8-bit floats to 16 bits.
    converts_eight_bits: bool
    #: Products of 8-bit floats by a warp (mma.sync), which the portable forward kernel for e4m3 is made of.
    multiplies_eight_bits: bool
    #: For them the assembler converts operands to 16 bits, which takes registers (measured).
    widens_eight_bits: bool
    #: bf16 tensor-core operands.
    has_bf16: bool
    #: Four-wide float reductions to global memory (red.global.add.v4.f32).
    has_vector_reduction: bool
    #: Matrix products by warpgroups (wgmma), which the forward kernel of FlashAttention-3 is made of.
    has_wgmma: bool
    #: The assembler finds no room for 32 rows of 64 scores beside 128 columns of output (measured: it spills).
    spills_wide_tiles: bool
    #: It finds none for the copies of four warps beside 128 columns of float output (measured: it spills).
    spills_float_copies: bool
    example: str

    registers_per_multiprocessor = 65536
    max_registers_per_thread = 255
    #: What the driver keeps of each block's shared memory.
    reserved_smem_per_block = 1024

    @property
    def major(self) -> int:
        """Cubins run only within their major capability."""
        return self.capability // 10

    @property
    def is_specific(self) -> bool:
        """Whether cubins run on this very compute capability only: what instructions of one generation cost."""
        return self.name.endswith("a")

    def runs_on(self, capability: int) -> bool:
        """Whether a cubin for this architecture loads on a device of that compute capability."""
        if self.is_specific:
            return self.capability == capability
        return self.major == capability // 10 and self.capability <= capability


def _row(name: str, block_kib: int, sm_kib: int, threads: int, blocks: int, example: str) -> Arch:
    digits = int(name.removeprefix("sm_").removesuffix("a"))
    return Arch(
        name=name,
        capability=digits,
        max_smem_per_block=block_kib * 1024,
        smem_per_multiprocessor=sm_kib * 1024,
        max_threads_per_multiprocessor=threads,
        max_blocks_per_multiprocessor=blocks,
        has_cp_async=digits >= 80,
        converts_eight_bits=digits >= 89,
        multiplies_eight_bits=digits >= 89,
        widens_eight_bits=90 <= digits < 120,
        has_bf16=digits >= 80,
        has_vector_reduction=digits >= 90,
        has_wgmma=name == "sm_90a",
        spills_wide_tiles=digits >= 100,
        spills_float_copies=86 <= digits < 90,
        example=example,
    )


#: What the command line builds for, and ``explain`` describes the first of, where there is no GPU and no name.
DEFAULT_ARCHS = ("sm_80", "sm_90a")
#: The same for 8-bit queries, keys and values.
EIGHT_BIT_ARCHS = ("sm_89", "sm_90a")

ARCHS: dict[str, Arch] = {
    row.name: row
    for row in (
        _row("sm_75", 64, 64, 1024, 16, "T4, RTX 20"),
        _row("sm_80", 163, 164, 2048, 32, "A100"),
        _row("sm_86", 99, 100, 1536, 16, "A10, RTX 30"),
        _row("sm_87", 163, 164, 1536, 16, "Jetson Orin"),
        _row("sm_89", 99, 100, 1536, 24, "L4, L40, RTX 40"),
        _row("sm_90", 227, 228, 2048, 32, "H100, H200"),
        _row("sm_90a", 227, 228, 2048, 32, "H100, H200, with Hopper-only instructions"),
        _row("sm_100", 227, 228, 2048, 32, "B200"),
        _row("sm_100a", 227, 228, 2048, 32, "B200, with Blackwell-only instructions"),
        _row("sm_103", 227, 228, 2048, 32, "B300"),
        _row("sm_120", 99, 100, 1536, 24, "RTX 50"),
    )
}


def get_arch(name: str | Arch) -> Arch:
    """The row for a name like ``sm_80`` (``80`` and ``8.0`` are understood too)."""
    if isinstance(name, Arch):
        return name
    text = show(name).strip("'\"").lower().strip()
    text = text if text.startswith("sm_") else "sm_" + text.replace(".", "").removeprefix("sm")
    if text not in ARCHS:
        raise PlanError(_unknown(show(name).strip("'\"")))
    return ARCHS[text]


def _unknown(name: str) -> str:
    from flashgen.arch.products import arch_of_product

    product = arch_of_product(name)
    remedy = f"use arch='{product}' for that GPU, or one of" if product else "use one of"
    return f"arch={name!r} is not known; {remedy} {', '.join(ARCHS)}"


def arch_for_capability(capability: int) -> Arch:
    """The best row whose cubins load on a device of this compute capability.

    That is one for this generation alone where it has instructions that kernels use, and no other row has.
    """
    fitting = [a for a in ARCHS.values() if a.runs_on(capability) and (a.has_wgmma or not a.is_specific)]
    if not fitting:
        major, minor = divmod(capability, 10)
        raise PlanError(
            f"compute capability {major}.{minor} is not supported; flashgen knows {', '.join(ARCHS)} "
            "and later minor versions of each"
        )
    return max(fitting, key=lambda a: (a.capability, a.has_wgmma))
