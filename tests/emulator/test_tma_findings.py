"""What is found of TMA: boxes that lie wrong, tensor maps that are none, bytes and waits that do not add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError
from flashgen.launch.driver.tensor_map import TensorMap
from tests.emulator.test_tma import SETUP, STORE, aligned, box_bytes, load, tensor_map


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "tma_load_2d(tile + 64, map, bar, 0, 0)",
            "misaligned: tma_load needs a shared-memory address that is a multiple of 128",
        ),
        ("tma_load_2d(tile + 16384, map, bar, 0, 0)", "shared memory out of bounds: tma_load touches 256 bytes"),
        ("tma_load_3d(tile, map, bar, 0, 0, 0)", "tma_load takes a tensor of 3 dimensions; this map has 2"),
        ("tma_store_4d(map, tile, 0, 0, 0, 0)", "tma_store takes a tensor of 4 dimensions; this map has 2"),
        ("TensorMap none = {}; tma_load_2d(tile, &none, bar, 0, 0)", "tma_load of something that is not a tensor map"),
        (
            "alignas(64) char b[192]; auto* m = (TensorMap*)(b + 16); __builtin_memcpy(m, map, 128);"
            " tma_load_2d(tile, m, bar, 0, 0)",
            "misaligned: tma_load needs a tensor map at a multiple of 64",
        ),
        ("TensorMap none = {}; prefetch_tensormap(&none)", "prefetch_tensormap of something that is not a tensor map"),
        ("tma_load_2d(tile, longer, bar, 0, 4)", "global memory out of bounds: tma_load touches 64 bytes at"),
        ("tma_store_2d(longer, tile, 0, 4)", "global memory out of bounds: tma_store touches 64 bytes at"),
        ("tma_load_2d(tile, map, bar + 8, 0, 0)", "uninitialised mbarrier: tma_load at offset 8"),
        (
            "tma_load_2d_multicast(tile, map, bar, 2, 0, 0)",
            "invalid operand: tma_load at address 0x2000800, which map_to_rank",
        ),
        ("tma_reduce_add_2d(bytes, tile, 0, 0)", "tma_reduce_add of elements that cannot be added"),
    ],
)
def test_misuse_is_a_finding_at_its_line(run: Any, call: str, message: str) -> None:
    array = aligned(np.zeros((4, 16), np.float32))
    m = tensor_map(array, "fp32", (16, 4))
    longer = TensorMap(m.address, "fp32", (16, 10), m.strides, m.box)
    bytes_ = TensorMap(m.address, "u8", (64, 4), m.strides, (64, 4))
    body = SETUP + "if (t == 0) {\n" + call + ";\n}"
    text = finding(run, body, smem=4096, maps={"map": m, "longer": longer, "bytes": bytes_}, tensor=array)
    assert message in text
    assert "at kernels/test.cu:6" in text


def test_a_store_to_memory_that_is_read_only_is_a_finding(run: Any, frozen: Any) -> None:
    array = frozen(aligned(np.zeros((4, 16), np.float32)))
    m = tensor_map(array, "fp32", (16, 4))
    text = finding(run, SETUP + "if (t == 0) tma_store_2d(map, tile, 0, 0);", smem=4096, maps={"map": m}, tensor=array)
    assert text.startswith("write to read-only memory: tma_store writes to")


def test_a_load_that_nobody_waited_for_is_a_finding(run: Any) -> None:
    array = aligned(np.zeros((4, 16), np.float32))
    body = SETUP + "if (t == 0) {\nmbarrier_arrive_expect_tx(bar, 256);\ntma_load_2d(tile, map, bar, 0, 0);\n}"
    text = finding(run, body, smem=4096, maps={"map": tensor_map(array, "fp32", (16, 4))}, tensor=array)
    assert text.startswith(
        "missing wait: all threads of block 0 have returned while a bulk load into its shared memory"
    )
    assert "at kernels/test.cu:7" in text


@pytest.mark.parametrize("wait", ["", "bulk_commit();", "bulk_wait<0>();", "bulk_commit(); bulk_wait_read<1>();"])
def test_a_store_that_nobody_waited_for_is_a_finding(run: Any, wait: str) -> None:
    array = aligned(np.zeros((4, 16), np.float32))
    body = SETUP + "if (t == 0) {\ntma_store_2d(map, tile, 0, 0);\n" + wait + "}"
    text = finding(run, body, smem=4096, maps={"map": tensor_map(array, "fp32", (16, 4))}, tensor=array)
    assert text.startswith("missing wait: this thread returned from the kernel without waiting until its bulk store")
    assert "at kernels/test.cu:6" in text


def test_wrong_byte_counts_are_deadlocks_that_say_so(run: Any) -> None:
    array = aligned(np.zeros((4, 16), np.float32))
    for bytes_, words in ((512, "misses 256 bytes"), (128, "128 bytes more than expected")):
        body = (
            SETUP
            + f"""if (t == 0) {{
          mbarrier_arrive_expect_tx(bar, {bytes_});
          tma_load_2d(tile, map, bar, 0, 0);
        }}
        mbarrier_wait(bar, 0);"""
        )
        text = finding(run, body, smem=4096, maps={"map": tensor_map(array, "fp32", (16, 4))}, tensor=array)
        assert text.startswith("deadlock:")
        assert words in text


@pytest.mark.parametrize(("element", "columns", "start"), [("u16", 32, 4), ("u16", 32, -1), ("u8", 64, 8)])
def test_a_box_begins_at_a_multiple_of_16_bytes_of_its_rows(run: Any, element: str, columns: int, start: int) -> None:
    dtype = {"u8": np.uint8, "u16": np.uint16}[element]
    m = tensor_map(aligned(np.ones((8, columns), dtype)), element, (16, 4))
    with pytest.raises(EmulationError, match=rf"^misaligned: tma_load of a box that begins at element {start} "):
        load(run, aligned(np.ones((8, columns), dtype)), m, (start, 0))


@pytest.mark.parametrize("place", ["-8, 0", "0, -1"])
@pytest.mark.parametrize("verb", ["store", "reduce_add"])
def test_a_box_that_is_stored_does_not_begin_before_the_tensor(run: Any, place: str, verb: str) -> None:
    array = aligned(np.zeros((9, 48), np.float32))
    m = tensor_map(array, "fp32", (16, 4))
    body = SETUP + STORE.format(verb=verb, bytes=box_bytes(m), rank=2, at=place)
    with pytest.raises(EmulationError, match=f"^invalid operand: tma_{verb} of a box that begins before the tensor"):
        run(body, smem=1024 + box_bytes(m), maps={"map": m}, tensor=array, x=np.zeros(box_bytes(m), np.uint8))
