"""Race mode: accesses that no schedule orders are findings under every schedule, with both sides named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

WORDS = "auto* w = reinterpret_cast<u32*>(shared); const int t = thread_idx();\n"


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(body, race=True, **options)
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random", "priority"])
def test_a_store_and_a_load_without_a_barrier_race_under_every_schedule(run: Any, schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    body = WORDS + "w[t] = t;\nif (out[0] == 7) block_sync();\nout[t] = w[t ^ 32];"
    text = finding(run, body, threads=64, smem=256, schedule=schedule, seed=3, out=out)
    # Under some schedules the load comes first, and no thread has written what it reads.
    assert text.startswith(("race: a load of 4 bytes at offset", "uninitialised shared memory: a load of 4"))
    assert "  at kernels/test.cu:4\n" in text
    assert f"schedule={schedule!r}, seed=3, race=True" in text


def test_both_sides_of_a_race_are_named(run: Any) -> None:
    body = WORDS + "if (t == 3) w[5] = 1;\nif (t == 40) w[5] = 2;"
    text = finding(run, body, threads=64, smem=256)
    assert text.splitlines()[:7] == [
        "race: a store of 4 bytes at offset 20 of shared memory and a store touch the same bytes; no barrier"
        " orders the two threads",
        "  at kernels/test.cu:3",
        "  by block 0, warp 1, lane 8 (thread 40)",
        "  the store:",
        "  at kernels/test.cu:2",
        "  by block 0, warp 0, lane 3 (thread 3)",
        "  in kernel kernel_under_test, schedule='sequential', seed=0, race=True, resident=2",
    ]


@pytest.mark.parametrize("barrier", ["block_sync();", "block_any(t == 3);"])
def test_a_barrier_of_the_block_orders(run: Any, barrier: str) -> None:
    out = np.zeros(64, np.uint32)
    body = WORDS + f"for (int i = 0; i < 3; ++i) {{ w[t] = t + i; {barrier} out[t] = w[t ^ 32]; {barrier} }}"
    run(body, threads=64, smem=256, race=True, out=out)
    np.testing.assert_array_equal(out, (np.arange(64) ^ 32) + 2)


def test_a_write_after_read_needs_a_barrier_too(run: Any) -> None:
    out = np.zeros(64, np.uint32)
    body = WORDS + "w[t] = t;\nblock_sync();\nout[t] = w[t ^ 32];\nw[t] = 1;"
    text = finding(run, body, threads=64, smem=256, out=out)
    assert text.startswith("race: a")
    assert "kernels/test.cu:4" in text
    assert "kernels/test.cu:5" in text


def test_every_reader_counts_not_only_the_last(run: Any) -> None:
    # Thread 7 and a whole warp read; the writer meets that warp alone before it writes.
    body = (
        WORDS
        + "if (t == 32) w[0] = 5;\nblock_sync();\nif (t == 7 || t >= 32) out[t] = w[0];\n"
        + "if (t >= 32) warp_sync();\nif (t == 33) w[0] = 6;"
    )
    text = finding(run, body, threads=64, smem=64, out=np.zeros(64, np.uint32))
    assert "warp 0, lane 7" in text
    assert "warp 1, lane 1" in text


def test_lanes_of_a_warp_are_ordered_by_warp_sync_alone(run: Any) -> None:
    out = np.zeros(32, np.uint32)
    run(WORDS + "w[t] = t; warp_sync(); out[t] = w[t ^ 1];", smem=128, race=True, out=out)
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)
    for exchange in ("shuffle(t, 0);", "warp_any(true);"):
        text = finding(run, WORDS + f"w[t] = t; {exchange} out[t] = w[t ^ 1];", smem=128, out=out)
        assert "no warp_sync or barrier orders the two lanes" in text


def test_a_warp_sync_does_not_order_other_warps(run: Any) -> None:
    text = finding(run, WORDS + "w[t] = t; warp_sync(); w[t ^ 32] = t;", threads=64, smem=256)
    assert "no barrier orders the two threads" in text


def test_order_is_passed_on_from_barrier_to_barrier(run: Any) -> None:
    # Lane 0 writes; warp_sync tells lane 1; the block barrier tells everybody.
    out = np.zeros(64, np.uint32)
    body = "if (t == 0) w[0] = 9; if (t < 32) warp_sync(); if (t == 1) w[0] += 1; block_sync(); out[t] = w[0];"
    run(WORDS + body, threads=64, smem=4, race=True, out=out)
    assert (out == 10).all()


@pytest.mark.parametrize(("kind", "bytes_"), [("u8", 1), ("u16", 2), ("u32", 4), ("u64", 8)])
def test_neighbours_of_any_size_do_not_race(run: Any, kind: str, bytes_: int) -> None:
    out = np.zeros(64, np.uint32)
    body = (
        f"auto* x = reinterpret_cast<{kind}*>(shared); const int t = thread_idx();"
        "for (int i = 0; i < 4; ++i) { x[t] = t + i; x[t] += 1; } block_sync(); out[t] = x[63 - t];"
    )
    run(body, threads=64, smem=64 * bytes_, race=True, out=out)
    np.testing.assert_array_equal(out, 63 - np.arange(64) + 4)


def test_one_byte_in_common_is_a_race(run: Any) -> None:
    body = "if (thread_idx() == 0) *reinterpret_cast<Vec16*>(shared + 16) = Vec16{};\n"
    text = finding(run, body + "if (thread_idx() == 32) shared[31] = 1;", threads=64, smem=64)
    assert "a store of 1 bytes at offset 31 of shared memory and a store" in text


def test_a_whole_line_written_in_pieces_and_read_at_once(run: Any) -> None:
    out = np.zeros(4, np.uint32)
    body = (
        "const int t = thread_idx(); if (t < 16) shared[t] = t; block_sync();"
        "if (t == 20) { const Vec16 v = *reinterpret_cast<Vec16*>(shared);"
        "for (int i = 0; i < 4; ++i) out[i] = v.words[i]; }\n"
    )
    run(body, threads=64, smem=16, race=True, out=out)
    np.testing.assert_array_equal(out.view(np.uint8), np.arange(16))
    text = finding(run, body + "if (t == 63) shared[9] = 1;", threads=64, smem=16, out=out)
    assert "a load of 16 bytes at offset 0" in text
    assert "lane 31" in text


@pytest.mark.parametrize(
    "read",
    [
        "out[0] = w[t];",
        "out[0] = reinterpret_cast<Vec16*>(shared)[t].words[0];",
        "u32 r[4]; ldmatrix_x4(r, shared_address(shared) + 16 * t);",
    ],
)
def test_reading_what_nobody_wrote_is_a_finding(run: Any, read: str) -> None:
    body = WORDS + f"if (t < 31) reinterpret_cast<Vec16*>(shared)[t] = Vec16{{}};\nblock_sync();\n{read}"
    text = finding(run, body.replace("[t];", "[4 * t];"), smem=512, out=np.zeros(1, np.uint32))
    assert text.startswith("uninitialised shared memory: a")
    assert "at offset 496 of shared memory reads bytes that no thread has written" in text
    assert "at kernels/test.cu:4" in text
    assert "lane 31" in text


def test_shared_memory_of_the_next_block_is_uninitialised_again(run: Any) -> None:
    body = WORDS + "if (block_idx_x() == 0) w[t] = 1;\nout[t] = w[t];"
    text = finding(run, body, smem=128, blocks=2, out=np.zeros(32, np.uint32))
    assert text.startswith("uninitialised shared memory")
    assert "by block 1" in text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("\nout[0] = w[t];", "a load of 4 bytes at offset 0 of shared memory touches bytes that a cp.async"),
        ("\nw[t] = 1;", "a store of 4 bytes at offset 0"),
        ("\nu32 r[2]; ldmatrix_x2(r, shared_address(shared));", "a ldmatrix of 16 bytes at offset 0"),
        ("\ncp_async_16(shared_address(shared), x, 16);", "a cp.async of 16 bytes at offset 0"),
        ("cp_async_wait<1>();\nout[0] = w[t];", "this thread has not waited for its group"),
    ],
)
def test_using_bytes_of_a_copy_in_flight_is_a_missing_wait(run: Any, body: str, message: str) -> None:
    x = np.zeros(16, np.uint32)
    x = x[-x.ctypes.data // 4 % 4 :][:4]
    start = WORDS + "cp_async_16(shared_address(shared) + 16 * t, x, 16); cp_async_commit();\n"
    text = finding(run, start + body, smem=512, x=x, out=np.zeros(1, np.uint32))
    assert text.startswith("missing wait")
    assert message in text
    assert "at kernels/test.cu:4" in text
    assert "the cp.async:\n  at kernels/test.cu:2" in text


def test_a_copy_belongs_to_its_thread_until_a_barrier(run: Any) -> None:
    x = np.arange(32, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    start = WORDS + "cp_async_4(shared_address(w + t), x + t, 4); cp_async_commit();\n"
    text = finding(run, start + "block_sync(); cp_async_wait<0>();\nout[t] = w[t ^ 1];", smem=128, x=x, out=out)
    assert text.startswith(("race: a load", "missing wait"))
    run(
        start + "cp_async_wait<0>(); out[t] = w[t]; block_sync(); out[t] += w[t ^ 1];",
        smem=128,
        race=True,
        x=x,
        out=out,
    )
    np.testing.assert_array_equal(out, x + (x ^ 1))


def test_a_copy_into_a_slot_that_others_still_read_is_a_race(run: Any) -> None:
    x, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    body = WORDS + "w[t] = t; block_sync();\nout[t] = w[t ^ 32];\ncp_async_4(shared_address(w + t), x + t, 4);"
    text = finding(run, body, threads=64, smem=256, x=x, out=out)
    assert text.startswith("race: a load of 4 bytes at offset 128 of shared memory and a cp.async touch")
    assert "the cp.async:\n  at kernels/test.cu:4" in text


def test_lanes_of_an_ldmatrix_may_overwrite_what_it_read(run: Any) -> None:
    out = np.zeros(32, np.uint32)
    body = (
        WORDS + "w[t] = t; warp_sync(); u32 r[2]; ldmatrix_x2(r, shared_address(shared) + t % 8 * 16);w[31 - t] = r[0];"
    )
    run(body + "warp_sync(); out[t] = w[31 - t];", smem=128, race=True, out=out)
    np.testing.assert_array_equal(out, np.arange(32))


def test_an_ldmatrix_needs_a_barrier_after_stores_of_other_lanes(run: Any) -> None:
    text = finding(run, WORDS + "w[t] = t;\nu32 r[2]; ldmatrix_x2(r, shared_address(shared) + t % 8 * 16);", smem=128)
    assert text.startswith("race: a ldmatrix of 16 bytes")
    assert "kernels/test.cu:3" in text
    assert "kernels/test.cu:2" in text


# ---- Bounds and alignment, at the very access


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "\nshared[100 + t] = 1;",
            "shared memory out of bounds: a store touches 1 bytes at offset 100 of 100",
        ),
        ("\nout[0] = shared[-1 - t];", "shared memory out of bounds: a load touches 1 bytes at offset -1 of"),
        ("\nshared[0x80000000ll] = 1;", "shared memory out of bounds: a store touches 1 bytes at offset"),
        ("\nshared[-0x80000001ll] = 1;", "shared memory out of bounds: a store touches 1 bytes at offset"),
        ("\nout[32 + t] = 1;", "global memory out of bounds: a store touches 4 bytes at address"),
        ("\nout[t] = out[-1 - t];", "4 bytes before 'out' (128 bytes)"),
        ("\nconst_cast<u32*>(x)[t] = 1;", "write to read-only memory: a store writes to address"),
        ("\n*reinterpret_cast<volatile u32*>(shared + 2) = 1;", "misaligned: a store needs a shared-memory"),
        (
            "\nreinterpret_cast<volatile u64*>(out + 1)[0] = 1;",
            "misaligned: a store needs an address that is",
        ),
    ],
)
def test_a_stray_access_is_a_finding_at_its_line(run: Any, frozen: Any, body: str, message: str) -> None:
    storage = np.zeros(64, np.uint32)
    out = storage[storage.ctypes.data // 4 % 2 :][:32]
    text = finding(run, WORDS + body, smem=100, x=frozen(np.zeros(32, np.uint32)), out=out)
    assert message in text
    assert "at kernels/test.cu:3" in text
    assert "by block 0, warp 0, lane 0" in text


def test_the_local_memory_of_another_thread_is_out_of_bounds(run: Any) -> None:
    body = (
        "volatile u32 local = thread_idx(); auto** p = reinterpret_cast<volatile u32**>(shared);\n"
        "if (thread_idx() == 0) *p = &local;\nwarp_sync();\nout[thread_idx()] = **p;"
    )
    text = finding(run, body, smem=8, out=np.zeros(32, np.uint32))
    assert text.startswith("stray access: a load of 4 bytes in the local memory of another thread")
    assert "kernels/test.cu:4" in text


def test_tables_of_constants_may_be_read(run: Any) -> None:
    out = np.zeros(32, np.uint32)
    prelude = "static const unsigned table[4] = {3, 1, 4, 1};"
    run("out[thread_idx()] = table[thread_idx() % 4];", race=True, prelude=prelude, out=out)
    np.testing.assert_array_equal(out, np.tile([3, 1, 4, 1], 8))


# ---- Global memory


def test_plain_stores_of_two_blocks_to_one_address_race(run: Any) -> None:
    text = finding(run, "\nif (thread_idx() == 0) out[0] = 1;", blocks=2, out=np.zeros(1, np.uint32))
    assert "offset 0 of 'out' (4 bytes) and a store touch the same bytes; they are by different blocks" in text
    assert "by block 1, warp 0, lane 0" in text
    assert "by block 0, warp 0, lane 0" in text


@pytest.mark.parametrize(
    ("body", "roles"),
    [
        ("if (block_idx_x() == 1) out[0] = 1; else out[1] = out[0];", ("store", "load")),
        ("if (block_idx_x() == 0) out[0] = 1; else out[1] = out[0];", ("load", "store")),
        ("if (block_idx_x() == 0) out[0] = 1; else reduce_add(out, 1.0f);", ("reduce_add", "store")),
        ("if (block_idx_x() == 0) reduce_add(out, 1.0f); else out[1] = out[0];", ("load", "reduce_add")),
        (
            "if (block_idx_x() == 0) cp_async_4(shared_address(shared), out, 4); else out[0] = 1;",
            ("store", "cp.async (its source)"),
        ),
    ],
)
def test_blocks_race_unless_both_accesses_are_atomic(run: Any, body: str, roles: tuple[str, str]) -> None:
    text = finding(run, f"if (thread_idx() == 0) {{ {body} }}", blocks=2, smem=4, out=np.zeros(2, np.float32))
    assert f"a {roles[0]} of 4 bytes" in text
    assert f"the {roles[1]}:" in text


def test_atomic_additions_and_reads_of_many_blocks_do_not_race(run: Any) -> None:
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    run(
        "reduce_add(out + thread_idx() % 8, x[63 - thread_idx()]);",
        threads=64,
        blocks=5,
        race=True,
        x=x,
        out=out,
    )
    np.testing.assert_array_equal(out[:8], 40)


def test_threads_of_a_block_race_in_global_memory_without_a_barrier(run: Any) -> None:
    out = np.zeros(64, np.uint32)
    run("out[thread_idx()] = 1; block_sync(); out[thread_idx() ^ 32] += 1;", threads=64, race=True, out=out)
    assert (out == 2).all()
    text = finding(run, "out[thread_idx()] = 1; out[thread_idx() ^ 32] += 1;", threads=64, out=out)
    assert "no barrier orders the two threads" in text


def test_a_launch_forgets_the_one_before(run: Any) -> None:
    out = np.zeros(32, np.uint32)
    for _ in range(2):
        run("out[thread_idx()] = block_idx_x();", race=True, out=out)
    finding(run, "\nout[0] = thread_idx();", out=out)
    run("out[thread_idx()] = block_idx_x();", race=True, out=out)
