from __future__ import annotations

import numpy as np
import pytest

from flashgen.arch import get_arch
from flashgen.cli.gpus import Gpu, archs_to_build, find_gpus, to_device, to_host
from flashgen.dtypes import DTYPES
from flashgen.errors import NoGpuError


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoGpuError("no NVIDIA driver was found")

    monkeypatch.setattr("flashgen.launch.driver.get_driver", none)
    assert find_gpus() == ()


def test_what_is_asked_for_comes_before_what_is_found() -> None:
    gpus = (Gpu(0, "A GPU", 86, 2**34), Gpu(1, "Another", 90, 2**34))
    asked = (get_arch("sm_120"),)
    assert archs_to_build(asked, gpus) == asked
    assert archs_to_build((), gpus) == (get_arch("sm_86"),)
    assert archs_to_build((), ()) == (get_arch("sm_80"), get_arch("sm_90a"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_an_array_comes_back_from_the_gpu_as_it_went(name: str) -> None:
    gpu = find_gpus()[0]
    for shape in ((2, 3, 5), (0, 4)):
        array = np.random.default_rng(0).standard_normal(shape).astype(DTYPES[name].numpy())
        back = to_host(to_device(array, gpu.ordinal))
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back.view(np.uint8), array.view(np.uint8))
