from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_copies_the_valid_bytes_and_zeroes_the_rest(run: Any, size: int) -> None:
    x = np.random.default_rng(0).integers(1, 256, 32 * size).astype(np.uint8)
    out = np.zeros((32, size), np.uint8)
    run(
        f"""const int t = thread_idx();
        cp_async_{size}(shared_address(shared) + t * {size}, x + t * {size}, t % {size + 1});
        cp_async_commit();
        cp_async_wait<0>();
        for (int i = 0; i < {size}; ++i) out[t * {size} + i] = shared[t * {size} + i];""",
        smem=512,
        x=x,
        out=out,
    )
    valid = np.arange(size) < (np.arange(32) % (size + 1))[:, None]
    np.testing.assert_array_equal(out, np.where(valid, x.reshape(32, size), 0))


def test_cp_async_with_no_valid_bytes_never_reads_its_source(run: Any) -> None:
    out = np.ones(1, np.uint32)
    run(
        """if (thread_idx() == 0) {
          cp_async_16(shared_address(shared), reinterpret_cast<void*>(0x1000), 0);
          cp_async_commit();
          cp_async_wait<0>();
          out[0] = reinterpret_cast<u32*>(shared)[0];
        }""",
        smem=16,
        out=out,
    )
    assert out[0] == 0


def test_the_destination_is_nan_until_its_group_is_waited_for(run: Any) -> None:
    x = np.arange(4, dtype=np.float32)
    out = np.zeros((4, 3), np.float32)
    run(
        """if (thread_idx() != 0) return;
        auto* f = reinterpret_cast<float*>(shared);
        for (int i = 0; i < 4; ++i) f[i] = -1.0f;
        for (int i = 0; i < 3; ++i) {
          cp_async_4(shared_address(f + i), x + i, 4);
          cp_async_commit();
        }
        for (int i = 0; i < 3; ++i) out[i] = f[i];
        cp_async_wait<2>();
        for (int i = 0; i < 3; ++i) out[3 + i] = f[i];
        cp_async_wait<1>();
        for (int i = 0; i < 3; ++i) out[6 + i] = f[i];
        cp_async_wait<0>();
        for (int i = 0; i < 3; ++i) out[9 + i] = f[i];""",
        smem=16,
        x=x,
        out=out,
    )
    nan = np.nan
    np.testing.assert_array_equal(out, [[nan, nan, nan], [0, nan, nan], [0, 1, nan], [0, 1, 2]])


def test_a_wait_does_not_complete_copies_that_were_never_committed(run: Any) -> None:
    out = np.zeros(1, np.float32)
    run(
        """if (thread_idx() != 0) return;
        cp_async_4(shared_address(shared), x, 4);
        cp_async_wait<0>();
        out[0] = *reinterpret_cast<float*>(shared);""",
        smem=16,
        x=np.ones(1, np.float32),
        out=out,
    )
    assert np.isnan(out[0])


def test_empty_groups_count_as_groups(run: Any) -> None:
    out = np.zeros(1, np.float32)
    run(
        """if (thread_idx() != 0) return;
        cp_async_4(shared_address(shared), x, 4);
        cp_async_commit();
        cp_async_commit();
        cp_async_wait<1>();
        out[0] = *reinterpret_cast<float*>(shared);""",
        smem=16,
        x=np.ones(1, np.float32),
        out=out,
    )
    assert out[0] == 1


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random", "priority"])
def test_reductions_of_all_blocks_add_up(run: Any, schedule: str) -> None:
    out = np.zeros(8, np.float32)
    run(
        """reduce_add(out + thread_idx() % 4, 1.0f);
        const float four[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        reduce_add_x4(out + 4, four);""",
        threads=64,
        blocks=3,
        schedule=schedule,
        out=out,
    )
    np.testing.assert_array_equal(out, [48] * 4 + [192 * i for i in (1, 2, 3, 4)])


def test_64_bit_reductions_carry_and_take_negative_numbers(run: Any) -> None:
    out = np.array([0xFFFFFFFF, 0, 5, 0], np.uint32)
    run(
        """u64* const sums = reinterpret_cast<u64*>(out);
        reduce_add(sums, 1);
        reduce_add(sums + 1, static_cast<u64>(-2 * thread_idx()));""",
        threads=64,
        blocks=2,
        race=True,
        out=out,
    )
    np.testing.assert_array_equal(out.view(np.int64), [0xFFFFFFFF + 128, 5 - 2 * 2 * 63 * 32])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cp_async_16(a + 8, x, 16)", "misaligned: cp.async destination needs"),
        ("cp_async_16(a, x + 2, 16)", "misaligned: cp.async needs a source address"),
        ("cp_async_16(a, x, 17)", "17 valid bytes of only 16"),
        ("cp_async_16(a + 64, x, 16)", "offset 64 of 64 bytes of shared memory"),
        ("cp_async_16(a - 16, x, 16)", "offset -16 of 64 bytes of shared memory"),
        ("cp_async_16(a, x + 32, 16)", "0 bytes past the end of 'x'"),
        ("cp_async_16(a, x - 4, 16)", "16 bytes before 'x'"),
        ("reduce_add(out + 32, 1.0f)", "reduce_add touches 4 bytes at"),
        ("reduce_add(reinterpret_cast<u64*>(out + 1), 1)", "misaligned: reduce_add needs"),
        (
            "reduce_add_x4(out + 1, {1, 2, 3, 4})",
            "misaligned: reduce_add needs an address that is a multiple of 16",
        ),
        ("reduce_add(const_cast<float*>(x), 1.0f)", "write to read-only memory"),
    ],
)
def test_a_bad_operand_is_a_finding_at_its_line(run: Any, frozen: Any, call: str, message: str) -> None:
    # Arrays come 64-byte aligned often, not always; the tests here need 16.
    storage = np.zeros(64, np.float32)
    first = -storage.ctypes.data // 4 % 4
    x, out = frozen(storage[first : first + 32]), np.zeros(64, np.float32)
    out = out[-out.ctypes.data // 4 % 4 :][:32]
    with pytest.raises(EmulationError) as caught:
        run(f"const u32 a = shared_address(shared);\n\n{call};", smem=64, x=x, out=out)
    assert message in str(caught.value)
    assert "kernels/test.cu:3" in str(caught.value)
    assert "block 0, warp 0, lane 0" in str(caught.value)


def test_under_random_schedules_a_copy_may_arrive_before_it_is_waited_for(run: Any) -> None:
    def value_after_overwriting(seed: int) -> float:
        out = np.zeros(1, np.float32)
        run(
            """auto* f = reinterpret_cast<float*>(shared);
            if (thread_idx() == 0) {
              cp_async_4(shared_address(f), x, 4);
              cp_async_commit();
              f[0] = 2.0f;
            }
            for (int i = 0; i < 4; ++i) warp_sync();
            if (thread_idx() == 0) out[0] = f[0];""",
            smem=4,
            schedule="random",
            seed=seed,
            x=np.ones(1, np.float32),
            out=out,
        )
        return float(out[0])

    values = {value_after_overwriting(seed) for seed in range(40)}
    assert values == {1.0, 2.0}
