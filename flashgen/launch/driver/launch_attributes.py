"""Launches with attributes: clusters, cooperative grids, and grids that start before their predecessor ends."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from flashgen.launch.driver.cuda import CudaDriver

#: How many configs a thread keeps; calls of so many shapes in turn are none of decoding or training.
_CONFIGS_KEPT = 256


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


class Configs(threading.local):
    """What the calling thread tells the driver of launches with attributes.

    Making a config takes as long as a launch does, and writing the stream into one nearly no time: so they are kept.
    The driver reads them while other threads run, so each thread has its own.
    """

    def __init__(self) -> None:
        self._made: dict[LaunchShape, Any] = {}

    def of(self, driver: CudaDriver, shape: LaunchShape) -> Any:
        """The config for launches of a shape; its stream is that of the last one, and to be written."""
        config = self._made.get(shape)
        if config is None:
            if len(self._made) >= _CONFIGS_KEPT:
                self._made.clear()
            config = self._made[shape] = _config(driver.api, shape)
        return config


def _config(api: Any, shape: LaunchShape) -> Any:
    """All that describes a launch to the driver, except the stream."""
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.smem_bytes
    config.attrs = _attributes(api, shape)
    config.numAttrs = len(config.attrs)
    return config


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
