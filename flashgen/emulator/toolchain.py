"""The host's C++ compiler: its path, its flags, and a digest that identifies its output."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen import settings
from flashgen.common.show import show
from flashgen.errors import CompileError

_CANDIDATES = ("c++", "g++", "clang++")
_INSTALL = (
    "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx),"
    " or set FLASHGEN_CXX to a g++ or clang++ that understands C++20"
)
_COMMON = (
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # Device code aliases bytes as different types, and relies on wrapping integers.
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-math-errno",
    "-Wl,-z,defs",
)
#: -g1: line tables, from which findings get places and chains of inlined calls.
KERNEL_FLAGS = (
    "-g1",
    "-w",
    "-Wno-narrowing",
    "-ffp-contract=off",
    # Without it, frames larger than a page could skip the guard page below the stack.
    "-fstack-clash-protection",
    # The linker's stubs have no source line. If the watchdog stopped a thread in one, its finding would have no place.
    "-fno-plt",
    "-DFLASHGEN_EMULATOR",
)
#: Compiling a kernel takes longer than running it. -fira-region=one makes register allocation cheap, which otherwise
#: takes a quarter of the time. Moving loop invariants costs nothing, and makes fp32 a tenth faster.
GCC_KERNEL_FLAGS = ("-Og", "-fira-region=one", "-fmove-loop-invariants")
#: Without a threshold, Clang follows the unroll pragmas meant for GPUs, and takes three times as long.
CLANG_KERNEL_FLAGS = ("-O1", "-mllvm", "-pragma-unroll-threshold=1")
#: A kernel calls only the runtime, the C library and the compiler's library. Searching the C++ libraries too would
#: double the link time.
GCC_KERNEL_LINK_FLAGS = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")
CLANG_KERNEL_LINK_FLAGS = ("-lm",)
#: Race mode: the compiler calls a hook before each load and store. The runtime defines the hooks instead of libtsan.
HOOK_FLAGS = ("-fsanitize=thread",)
#: GCC's hooks of function entries and exits are not needed, and cost time.
GCC_HOOK_FLAGS = ("--param=tsan-instrument-func-entry-exit=0",)
#: Clang would merge the hook calls of two places, and lose both line numbers.
CLANG_HOOK_FLAGS = ("-mllvm", "-simplifycfg-sink-common=false")
#: Clang calls these instead of hooks for whole structs. The runtime wraps them.
CLANG_HOOK_LINK_FLAGS = ("-Wl,--wrap=memcpy", "-Wl,--wrap=memmove", "-Wl,--wrap=memset")
RUNTIME_FLAGS = ("-O2", "-ffp-contract=fast", "-Wall", "-Wextra")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C++ compiler and its identity."""

    path: str
    #: First line of ``--version``, for messages.
    version: str
    #: A digest of everything but flags that affects machine code: the compiler and the processor.
    identity: str
    is_clang: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags common to everything the emulator builds."""
        tune = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
        # All kernels of a process would share unique symbols, whatever their visibility.
        return (*_COMMON, tune, *(() if self.is_clang else ("-fno-gnu-unique",)))

    @property
    def kernel_flags(self) -> tuple[str, ...]:
        """Additional flags for kernels."""
        return (*KERNEL_FLAGS, *(CLANG_KERNEL_FLAGS if self.is_clang else GCC_KERNEL_FLAGS))

    @property
    def kernel_link_flags(self) -> tuple[str, ...]:
        """Flags for linking a kernel, after its inputs."""
        return CLANG_KERNEL_LINK_FLAGS if self.is_clang else GCC_KERNEL_LINK_FLAGS

    @property
    def hook_flags(self) -> tuple[str, ...]:
        """Flags that add hooks to a kernel's loads and stores."""
        return (*HOOK_FLAGS, *(CLANG_HOOK_FLAGS if self.is_clang else GCC_HOOK_FLAGS))

    @property
    def hook_link_flags(self) -> tuple[str, ...]:
        """Additional flags for linking such a kernel."""
        return CLANG_HOOK_LINK_FLAGS if self.is_clang else ()

    def run(self, arguments: Sequence[str], output: Path, what: str) -> None:
        """Runs the compiler. Raises CompileError with its output if it fails."""
        done = subprocess.run(
            [self.path, *self.flags, *arguments, "-o", str(output)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            # Debug information contains the working directory. A fixed one makes the output reproducible for the cache.
            cwd="/",
        )
        if done.returncode != 0:
            raise CompileError(
                f"the host compiler {self.path} ({self.version}) could not compile {what}", done.stderr.strip()
            )
        if not output.is_file():
            raise CompileError(
                f"the C++ compiler {self.path} wrote no output for {what}; {_INSTALL}", done.stderr.strip()
            )


def find_toolchain() -> Toolchain:
    """The compiler that FLASHGEN_CXX names; else that of CXX, if it names one; else the first on the PATH."""
    wanted = settings.cxx()
    for name in (wanted,) if wanted else (os.environ.get("CXX", ""), *_CANDIDATES):
        path = shutil.which(name)
        if path is not None:
            # The compiler runs in another working directory, so the path must be absolute.
            return _describe(os.path.abspath(path))
    if wanted:
        raise CompileError(f"FLASHGEN_CXX={show(wanted)} is not an executable; {_INSTALL}")
    raise CompileError(f"the emulator needs a C++ compiler and found none of {', '.join(_CANDIDATES)}; {_INSTALL}")


@functools.lru_cache(maxsize=8)
def _describe(path: str) -> Toolchain:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompileError(f"the C++ compiler {path} does not run ({error.strerror}); {_INSTALL}") from None
    if done.returncode != 0:
        raise CompileError(f"the C++ compiler {path} does not run; {_INSTALL}", done.stderr.strip())
    version = done.stdout.strip().split("\n", 1)[0]
    identity = "\n".join((path, done.stdout, platform.machine(), _processor()))
    digest = hashlib.sha256(identity.encode(), usedforsecurity=False).hexdigest()
    return Toolchain(path, version, digest, "clang" in done.stdout.lower())


def _processor() -> str:
    """The processor's model and features, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    # All cores are alike, and fields that vary, such as frequencies, are left out.
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            found.setdefault(key.strip(), value.strip())
    return repr(sorted(found.items()))
