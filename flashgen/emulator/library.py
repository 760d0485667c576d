"""The ctypes interface of the runtime library, with the layouts of ``runtime/api.h``."""

from __future__ import annotations

import ctypes
import threading

from flashgen.emulator.build import runtime_library
from flashgen.emulator.loading import load_library

#: Names of the schedules, by the numbers of ``FlashgenEmuSchedule``.
SCHEDULES = {"sequential": 0, "reverse": 1, "random": 2, "priority": 3}

#: The runtime has global state, so launches are serialized.
launch_lock = threading.Lock()


class BufferRecord(ctypes.Structure):
    """``FlashgenEmuBuffer``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("from_primary", ctypes.c_int32),
    )


class TrafficRecord(ctypes.Structure):
    """``FlashgenEmuTraffic``."""

    _fields_ = (("read", ctypes.c_uint64), ("written", ctypes.c_uint64))


class LaunchRecord(ctypes.Structure):
    """``FlashgenEmuLaunch``."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("grid", ctypes.c_int64 * 3),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("race", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("buffers", ctypes.POINTER(BufferRecord)),
        ("buffer_count", ctypes.c_int32),
        ("traffic", ctypes.POINTER(TrafficRecord)),
        ("spin_nanoseconds", ctypes.c_uint64),
    )


class PlaceRecord(ctypes.Structure):
    """``FlashgenEmuPlace``."""

    _fields_ = (
        ("file", ctypes.c_char * 512),
        ("line", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("thread", ctypes.c_int32),
        ("library", ctypes.c_char * 1024),
        ("code_offset", ctypes.c_uint64),
    )


class ReportRecord(ctypes.Structure):
    """``FlashgenEmuReport``."""

    _fields_ = (
        ("kind", ctypes.c_char * 64),
        ("what", ctypes.c_char * 6000),
        ("place", PlaceRecord),
        ("other_role", ctypes.c_char * 64),
        ("other", PlaceRecord),
    )


def load_runtime() -> ctypes.CDLL:
    """The runtime library. A process loads each build once."""
    library = load_library(runtime_library)
    library.flashgen_emu_launch.argtypes = (ctypes.POINTER(LaunchRecord), ctypes.POINTER(ReportRecord))
    library.flashgen_emu_launch.restype = ctypes.c_int
    return library
