"""A driver and arrays made of nothing: they record what a launch would have done."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from flashgen.errors import LaunchError
from flashgen.launch.driver import cuda as driver_module
from flashgen.launch.executor import Executor
from flashgen.launch.gpu import GpuTarget
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan import plan, workspaces
from flashgen.spec import AttentionSpec

_addresses = itertools.count(1)


def context_of(device: int) -> int:
    return 0xC0 + device


@dataclass
class Launch:
    name: str
    device: int
    stream: int
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    values: dict[str, Any]
    #: Whether it may start before the one before it has ended.
    overlaps: bool = False


class Names:
    """Stands for the bindings: whatever is asked of it has a name, and numbers are what they are.

    Launch arguments are the bindings' own.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name) if name.startswith("CUlaunch") else self

    def __call__(self, number: int) -> int:
        return number


def encode(address: int, words: list[int]) -> list[int]:
    """The first word of a tensor map is the address."""
    return [address, *words]


@dataclass
class FakeDriver:
    """As much of ``CudaDriver`` as launching needs; every device is an H100."""

    process: int = field(default_factory=os.getpid)
    success: int = 0
    current: list[int] = field(default_factory=lambda: [context_of(0)])
    capturing: bool = False
    refuses: bool = False
    launches: list[Launch] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    freed: list[tuple[int, int]] = field(default_factory=list)
    plans: dict[str, Any] = field(default_factory=dict)
    api: Names = field(default_factory=Names)
    encode: Callable[[int, list[int]], list[int]] = encode
    #: Device and size of each stretch of zeroed memory.
    zeroed: list[tuple[int, int]] = field(default_factory=list)
    is_full: bool = False
    overlaps_grids: bool = True

    def capability(self, device: int) -> int:
        return 90

    def multiprocessors(self, device: int) -> int:
        return 132

    def call(self, name: str, *arguments: Any) -> Any:
        assert name == "cuTensorMapEncodeTiled"
        assert self.current_context(), "the driver needs a context to encode"
        _, _, address, dims, strides, box, *_ = arguments
        made = self.encode(address, [*dims, *strides, *box])
        return SimpleNamespace(opaque=[*made, *([0] * (16 - len(made)))])

    def allocate_zeroed(self, nbytes: int) -> int:
        assert not self.capturing, "nothing is allocated during capture"
        if self.is_full:
            raise LaunchError("cuMemAlloc failed: out of memory")
        device = self.current_context() - 0xC0
        self.zeroed.append((device, nbytes))
        return (device << 40) + len(self.zeroed) * (1 << 36)

    def primary_context(self, device: int) -> int:
        return context_of(device)

    def current_context(self) -> int:
        return self.current[-1]

    def push_context(self, context: int) -> None:
        self.current.append(context)

    def pop_context(self) -> None:
        self.current.pop()

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        self.push_context(context_of(device))
        yield
        self.pop_context()

    def load(self, image: bytes) -> bytes:
        return image

    def function(self, library: bytes, name: str, smem_bytes: int) -> str:
        self.loads.append(self.current_context() - 0xC0)
        return f"{library.decode()}:{name}"

    def launch_kernel(self, function: str, *arguments: Any) -> tuple[int]:
        *grid, threads, _, _, smem_bytes, stream, params, extra = arguments
        assert extra == 0
        return self._launched(function, tuple(grid), threads, smem_bytes, stream, params)

    def launch_kernel_ex(self, config: Any, function: str, params: int, extra: int) -> tuple[int]:
        assert (config.blockDimY, config.blockDimZ, config.numAttrs, extra) == (1, 1, 1, 0)
        (attribute,) = config.attrs
        assert attribute.id == bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlaps = attribute.value.programmaticStreamSerializationAllowed == 1
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        threads, stream = config.blockDimX, int(config.hStream)
        return self._launched(function, grid, threads, config.sharedMemBytes, stream, params, overlaps)

    def _launched(
        self,
        function: str,
        grid: Any,
        threads: int,
        smem_bytes: int,
        stream: int,
        params: int,
        overlaps: bool = False,
    ) -> tuple[int]:
        if self.refuses:
            return (719,)
        pointer = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        table = self.plans[function].params
        fields = struct.unpack_from(table.format, ctypes.string_at(pointer, table.bytes))
        values = dict(zip(table.names, fields, strict=True))
        device = self.current_context() - 0xC0
        self.launches.append(Launch(function, device, stream, grid, threads, smem_bytes, values, overlaps))
        return (0,)

    def fail(self, what: str, status: int) -> LaunchError:
        return LaunchError(f"{what} failed: error {status}")

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def wait(self, stream: int, producer: int) -> None:
        self.waits.append((stream, producer))

    def device_of(self, pointer: int) -> int:
        return pointer >> 40

    def allocate(self, nbytes: int, stream: int) -> int:
        return (self.current_context() - 0xC0 << 40) + 0x4000_0000_0000 % (1 << 40) + next(_addresses) * (1 << 20)

    def free(self, pointer: int, stream: int) -> None:
        self.freed.append((pointer, stream))


@dataclass
class CudaArray:
    """An object with nothing but the CUDA array interface."""

    __cuda_array_interface__: dict[str, Any]

    @property
    def pointer(self) -> int:
        return int(self.__cuda_array_interface__["data"][0])


def cuda_array(
    *shape: int,
    strides: tuple[int, ...] | None = None,
    dtype: str = "<f2",
    device: int = 0,
    offset: int = 0,
    stream: int | None = None,
) -> CudaArray:
    """Strides in elements; ``offset`` in bytes from a well-aligned address."""
    size = int(dtype[2:])
    address = (device << 40) + next(_addresses) * (1 << 20) + offset
    interface: dict[str, Any] = {"shape": shape, "typestr": dtype, "data": (address, False), "version": 3}
    if strides is not None:
        interface["strides"] = tuple(s * size for s in strides)
    if stream is not None:
        interface["stream"] = stream
    return CudaArray(interface)


@dataclass
class Bench:
    """An executor over the fake driver, and how often it had to plan another variant."""

    executor: Executor
    driver: FakeDriver
    variants: list[int]


def make_variant(
    spec: AttentionSpec, driver: FakeDriver, access_bytes: int | None = None, arch: str = "sm_90"
) -> Variant:
    attention = plan(spec, None, arch, access_bytes=access_bytes)
    loadables = {}
    for kernel in attention.kernels:
        image = f"access{kernel.access_bytes}"
        driver.plans[f"{image}:{kernel.name}"] = kernel
        loadables[kernel.role] = Loadable(kernel, None, SimpleNamespace(image=image.encode()))
    return Variant(attention, loadables)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver_module, "_driver", fake)
    return fake


@pytest.fixture
def bench(driver: FakeDriver) -> Callable[..., Bench]:
    def make(head_dim: int = 64, *, arch: str = "sm_90", **options: Any) -> Bench:
        spec = AttentionSpec(head_dim, **{"dtype": "fp16", **options})
        made: list[int] = []

        def realigned(access_bytes: int) -> Variant:
            made.append(access_bytes)
            return make_variant(spec, driver, access_bytes, arch)

        target = GpuTarget(driver)  # type: ignore[arg-type]
        return Bench(Executor(make_variant(spec, driver, arch=arch), realigned, target, workspaces), driver, made)

    return make


@pytest.fixture
def array() -> Callable[..., CudaArray]:
    return cuda_array


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a ``libcuda.so.1`` that only records calls."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    assert compiler, "a C++ compiler is needed, as for the emulator"
    directory = tmp_path_factory.mktemp("libcuda")
    source = Path(__file__).with_name("libcuda.cpp")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-o", directory / "libcuda.so.1", source, "-ldl"]
    subprocess.run(command, check=True)
    return directory
