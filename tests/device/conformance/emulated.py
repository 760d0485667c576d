"""A case on the emulator."""

from __future__ import annotations

import functools

from conformance.case import Array, Case
from conformance.cases import variants_of
from conformance.packing import arrays_of, pack
from conformance.source import symbol, unit
from flashgen.emulator.guard import guarded_copy
from flashgen.emulator.kernel import Buffer, EmulatedKernel


@functools.cache
def _kernel(kernel: str) -> EmulatedKernel:
    return EmulatedKernel(symbol(kernel), unit(kernel, variants_of(kernel)))


def run(case: Case, *, schedule: str = "sequential", seed: int = 0, race: bool = False) -> dict[str, Array]:
    """The outputs after the launch."""
    arrays = {name: guarded_copy(value) for name, value in arrays_of(case).items()}
    addresses = {name: array.ctypes.data for name, array in arrays.items()}
    buffers = [Buffer(name, addresses[name], array.nbytes, name in case.outputs) for name, array in arrays.items()]
    index = variants_of(case.kernel).index(case.variant)
    params = pack(case, index, addresses, lambda m: m.encoded(addresses))
    together = {"cluster": case.cluster} if case.cluster else {}
    if case.cooperative:
        together["cooperative"] = True
    for _ in range(case.launches):
        _kernel(case.kernel).launch(
            case.grid,
            params,
            buffers,
            threads=case.threads,
            smem_bytes=case.smem_bytes,
            schedule=schedule,
            seed=seed,
            race=race,
            **together,
        )
    return {name: arrays[name].copy() for name in case.outputs}
