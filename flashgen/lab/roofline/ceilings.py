"""The ceilings of a GPU: copies, matrix products and exponentials, measured by kernels that do nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from flashgen.arch import Arch
from flashgen.lab.roofline.kernels import (
    CHAINS,
    COPY,
    EXPONENTIALS,
    PRODUCTS_WGMMA,
    THREADS,
    Launcher,
    product_flops,
    product_source,
    product_values,
    products_of,
)
from flashgen.lab.timing.device import Device
from flashgen.lab.timing.rounds import interleaved

Bound = Literal["copy", "matrix", "exp"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
#: How each is called in sentences.
NAMES: dict[Bound, str] = {
    "copy": "copies to and from device memory",
    "matrix": "matrix products",
    "exp": "exponentials",
}
_ROUNDS = 5
_CALLS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a GPU reaches when it does one thing only."""

    #: Bytes read and bytes written, in billions a second.
    copy_gbps: float
    matrix_tflops: float
    #: Billions a second.
    exp_gops: float

    def ms(self, bound: Bound, *, bytes: float, flops: float, exponentials: float) -> float:
        """How long a ceiling needs for its part of some work."""
        amounts: dict[Bound, float] = {"copy": bytes, "matrix": flops, "exp": exponentials}
        rates: dict[Bound, float] = {
            "copy": 1e9 * self.copy_gbps,
            "matrix": 1e12 * self.matrix_tflops,
            "exp": 1e9 * self.exp_gops,
        }
        return 1e3 * amounts[bound] / rates[bound]

    def as_dict(self) -> dict[str, float]:
        """Plain values, as for JSON."""
        return {"copy_gbps": self.copy_gbps, "matrix_tflops": self.matrix_tflops, "exp_gops": self.exp_gops}

    def __str__(self) -> str:
        return (
            f"copy {self.copy_gbps:.4g} GB/s, matrix products {self.matrix_tflops:.4g} TFLOP/s, "
            f"exponentials {self.exp_gops:.4g} billion/s"
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """How much each kernel does: milliseconds on a GPU, next to nothing in tests."""

    copy_bytes: int = 2**29
    product_steps: int = 10_000
    exponential_steps: int = 5_000


@dataclass(frozen=True, slots=True)
class Probe:
    """A launch that does a known amount of one kind of work."""

    launch: Callable[[], object]
    amount: float


def measure_ceilings(
    device: Device, launcher: Launcher, arch: Arch, multiprocessors: int, scale: Scale = Scale()
) -> Ceilings:
    """The three ceilings, each the median of interleaved rounds."""
    probes = _probes(device, launcher, arch, multiprocessors, scale)
    for probe in probes.values():
        probe.launch()
    timed = {name: (lambda calls, p=probe: device.times(p.launch, calls)) for name, probe in probes.items()}
    # As many calls of each: all take a few milliseconds.
    timings = interleaved(timed, dict.fromkeys(timed, 1.0), _ROUNDS, float(_CALLS))
    rates = {name: probe.amount / timings[name].ms / 1e-3 for name, probe in probes.items()}
    return Ceilings(rates["copy"] / 1e9, rates["matrix"] / 1e12, rates["exp"] / 1e9)


def _probes(device: Device, launcher: Launcher, arch: Arch, multiprocessors: int, scale: Scale) -> dict[Bound, Probe]:
    random = np.random.default_rng(0)
    full = arch.max_threads_per_multiprocessor // THREADS

    def probe(kernel: Any, blocks: int, source: Any, values: int, number: int, amount: float) -> Probe:
        arrays = (device.put(source), device.put(np.zeros(values, np.float32)))
        return Probe(launcher.prepared(kernel, blocks, arrays, number), amount)

    floats = scale.copy_bytes // 4
    pattern = random.standard_normal(min(floats, 2**20), dtype=np.float32)
    source = np.resize(pattern, floats)
    copy = probe(COPY, multiprocessors * full, source, floats, floats // 4, 2.0 * 4 * floats)

    products = products_of(arch)
    # One block of two warpgroups takes most registers of a multiprocessor.
    blocks = multiprocessors * (1 if products is PRODUCTS_WGMMA else full // 2)
    values = blocks * product_values(products)
    work = float(blocks) * scale.product_steps * product_flops(products)
    matrix = probe(products, blocks, product_source(products, random), values, scale.product_steps, work)

    blocks = multiprocessors * full
    chains = random.random(blocks * THREADS * CHAINS, np.float32)
    work = float(chains.size) * scale.exponential_steps
    exponentials = probe(EXPONENTIALS, blocks, chains, chains.size, scale.exponential_steps, work)
    return {"copy": copy, "matrix": matrix, "exp": exponentials}
