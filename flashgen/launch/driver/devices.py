"""The GPUs of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.errors import NoGpuError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device that this process may use."""

    ordinal: int
    name: str
    capability: int
    memory_bytes: int

    def describe(self) -> str:
        """One line for people."""
        major, minor = divmod(self.capability, 10)
        return f"cuda:{self.ordinal} {self.name}, {major}.{minor}, {self.memory_bytes / 2**30:.0f} GiB"


def find_gpus() -> tuple[Gpu, ...]:
    """Every GPU; none without a driver. Creates no context."""
    from flashgen.launch.driver.cuda import get_driver

    try:
        driver = get_driver()
    except NoGpuError:
        return ()
    gpus = []
    for ordinal in range(driver.device_count()):
        handle = driver.call("cuDeviceGet", ordinal)
        memory = int(driver.call("cuDeviceTotalMem", handle))
        gpus.append(Gpu(ordinal, driver.device_name(ordinal), driver.capability(ordinal), memory))
    return tuple(gpus)
