"""Launches with attributes: clusters, cooperative grids, and grids that start before their predecessor ends."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashgen.launch.driver import CudaDriver


class LaunchShape(NamedTuple):
    """How many blocks of how many threads, and what they may rely on."""

    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int = 0
    #: Blocks of a cluster along x, y and z; they run at the same time and see each other's shared memory.
    cluster: tuple[int, int, int] | None = None
    #: All blocks run at the same time, so that they may wait for each other.
    cooperative: bool = False
    #: The grid may start while the one before it on the stream still runs; it waits by ``griddepcontrol``.
    overlaps_predecessor: bool = False


def launch_extended(driver: CudaDriver, function: Any, shape: LaunchShape, stream: int, params: int) -> None:
    """Launches in the current context; ``params`` is the address of the array of parameter addresses."""
    config = driver.api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.smem_bytes
    config.hStream = stream
    config.attrs = _attributes(driver.api, shape)
    config.numAttrs = len(config.attrs)
    driver.call("cuLaunchKernelEx", config, function, params, 0)


def _attributes(api: Any, shape: LaunchShape) -> list[Any]:
    """One attribute for each property that differs from a plain launch."""
    ids = api.CUlaunchAttributeID
    found = []
    if shape.cluster is not None:
        found.append(_attribute(api, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION))
        cluster = found[-1].value.clusterDim
        cluster.x, cluster.y, cluster.z = shape.cluster
    if shape.cooperative:
        found.append(_attribute(api, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE))
        found[-1].value.cooperative = 1
    if shape.overlaps_predecessor:
        found.append(_attribute(api, ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION))
        found[-1].value.programmaticStreamSerializationAllowed = 1
    return found


def _attribute(api: Any, kind: Any) -> Any:
    attribute = api.CUlaunchAttribute()
    attribute.id = kind
    return attribute
