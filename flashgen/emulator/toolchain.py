"""The host's C++ compiler: which one, its flags, and what identifies its output."""

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
    # Device code reads the same bytes under several types, and lets integers wrap.
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-math-errno",
    "-Wl,-z,defs",
)
#: -g1: the line tables that name the place of a fault, with the chain of inlined calls.
KERNEL_FLAGS = (
    "-g1",
    "-w",
    "-Wno-narrowing",
    "-ffp-contract=off",
    # Frames larger than a page must not reach over the page below the stack.
    "-fstack-clash-protection",
    "-DFLASHGEN_EMULATOR",
)
#: A kernel is compiled for longer than it runs. Allocating registers loop by loop would take a quarter of the time;
#: moving what a loop does not change out of it takes none, and fp32 runs a tenth faster.
GCC_KERNEL_FLAGS = ("-Og", "-fira-region=one", "-fmove-loop-invariants")
#: Clang would heed the pragmas that unroll loops for a GPU, and take three times as long.
CLANG_KERNEL_FLAGS = ("-O1", "-mllvm", "-pragma-unroll-threshold=1")
#: All that a kernel calls is in the runtime, the C library and the compiler's own: to look through those of C++ as
#: well takes the linker as long as everything else does.
GCC_KERNEL_LINK_FLAGS = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")
CLANG_KERNEL_LINK_FLAGS = ("-lm",)
#: Race mode: the compiler calls a hook before each load and store; the runtime has these, not libtsan.
HOOK_FLAGS = ("-fsanitize=thread",)
#: GCC's hooks of function entries and exits, which nobody needs, cost time.
GCC_HOOK_FLAGS = ("--param=tsan-instrument-func-entry-exit=0",)
#: Clang would make one call of two places' hooks, and then know the line of neither.
CLANG_HOOK_FLAGS = ("-mllvm", "-simplifycfg-sink-common=false")
#: Instead of hooks, Clang calls these for whole structs; the runtime has its own of them.
CLANG_HOOK_LINK_FLAGS = ("-Wl,--wrap=memcpy", "-Wl,--wrap=memmove", "-Wl,--wrap=memset")
RUNTIME_FLAGS = ("-O2", "-ffp-contract=fast", "-Wall", "-Wextra")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler that was found, and its full identity."""

    path: str
    #: First line of ``--version``, for people.
    version: str
    #: Changes whenever the same source could give other machine code: compiler, processor.
    identity: str
    is_clang: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags common to everything the emulator builds."""
        tune = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
        # Unique symbols are shared between all kernels of a process, whatever their visibility.
        return (*_COMMON, tune, *(() if self.is_clang else ("-fno-gnu-unique",)))

    @property
    def kernel_flags(self) -> tuple[str, ...]:
        """Further flags of kernels."""
        return (*KERNEL_FLAGS, *(CLANG_KERNEL_FLAGS if self.is_clang else GCC_KERNEL_FLAGS))

    @property
    def kernel_link_flags(self) -> tuple[str, ...]:
        """Flags that link a kernel, behind what is linked."""
        return CLANG_KERNEL_LINK_FLAGS if self.is_clang else GCC_KERNEL_LINK_FLAGS

    @property
    def hook_flags(self) -> tuple[str, ...]:
        """Flags that make a kernel tell of its loads and stores."""
        return (*HOOK_FLAGS, *(CLANG_HOOK_FLAGS if self.is_clang else GCC_HOOK_FLAGS))

    @property
    def hook_link_flags(self) -> tuple[str, ...]:
        """Flags that link such a kernel."""
        return CLANG_HOOK_LINK_FLAGS if self.is_clang else ()

    def run(self, arguments: Sequence[str], output: Path, what: str) -> None:
        """Compile into ``output``; CompileError with the compiler's words when it refuses."""
        done = subprocess.run(
            [self.path, *self.flags, *arguments, "-o", str(output)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            # Debug information names relative files after the directory it was made in: the same one always, for
            # what is compiled is cached and read by others.
            cwd="/",
        )
        if done.returncode != 0:
            raise CompileError(f"the host compiler {self.path} ({self.version}) refused {what}", done.stderr.strip())
        if not output.is_file():
            raise CompileError(f"the C++ compiler {self.path} made nothing of {what}; {_INSTALL}", done.stderr.strip())


def find_toolchain() -> Toolchain:
    """The compiler that FLASHGEN_CXX names; else that of CXX, if it names one; else the first on the PATH."""
    wanted = settings.cxx()
    for name in (wanted,) if wanted else (os.environ.get("CXX", ""), *_CANDIDATES):
        path = shutil.which(name)
        if path is not None:
            # It runs in another directory.
            return _describe(os.path.abspath(path))
    if wanted:
        raise CompileError(f"FLASHGEN_CXX={show(wanted)} is not a program that can be run; {_INSTALL}")
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
    """The processor's model and features: what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    # The first core speaks for all; frequencies and the like differ from run to run and stay out.
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            found.setdefault(key.strip(), value.strip())
    return repr(sorted(found.items()))
