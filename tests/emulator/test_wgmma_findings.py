"""What must not be done with a warpgroup's products, and the mode that tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

#: Two 64 x 16 operands of ones, K-major and swizzled by 128 bytes; 64 x 64 accumulators.
SETUP = """const int t = thread_idx();
auto* halves = reinterpret_cast<u16*>(shared);
for (int i = t; i < 8192; i += {threads}) halves[i] = 0x3f80;
fence_proxy_async();
block_sync();
const u32 base = shared_address(shared);
const auto a = matrix_descriptor(base, 16, 1024, Swizzle::bytes_128);
const auto b = matrix_descriptor(base + 8192, 16, 1024, Swizzle::bytes_128);
float d[32], e[32];
for (int i = 0; i < 32; ++i) d[i] = e[i] = 1.0f;
#line 1 "kernels/test.cu"
"""
RESULT = "\nfor (int i = 0; i < 32; ++i) out[(t % 128) * 32 + i] = d[i];"
PRODUCT = "wgmma_ss<bfloat16_t, 64>(d, a, b, true);"


def results(run: Any, body: str, *, threads: int = 128, smem: int = 16384, **options: Any) -> Any:
    out = np.zeros((128, 32), np.float32)
    run(SETUP.format(threads=threads) + body + RESULT, threads=threads, smem=smem, out=out, **options)
    return out


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        results(run, body, **options)
    return str(caught.value)


@pytest.mark.parametrize("race", [False, True])
def test_a_correct_kernel_has_no_findings(run: Any, race: bool) -> None:
    body = f"""for (int round = 0; round < 3; ++round) {{
      wgmma_fence(); {PRODUCT} wgmma_commit(); wgmma_wait<0>();
      for (int i = 0; i < 32; ++i) d[i] += 1.0f;
      block_sync();
      halves[t] = 0x3f80;
      fence_proxy_async();
      block_sync();
    }}"""
    assert (results(run, body, race=race) == 1 + 3 * 17).all()


def test_a_wait_hands_back_what_was_finished_and_nothing_else(run: Any) -> None:
    body = f"""wgmma_fence();
    {PRODUCT}
    wgmma_commit();
    wgmma_ss<bfloat16_t, 64>(e, a, b, false);
    wgmma_commit();
    wgmma_wait<1>();
    for (int i = 0; i < 16; ++i) d[i] += e[i];
    wgmma_wait<0>();
    for (int i = 0; i < 16; ++i) d[16 + i] += e[i];"""
    out = results(run, body)
    assert np.isnan(out[:, :16]).all()
    assert (out[:, 16:] == 17 + 16).all()


def test_accumulators_stay_poison_while_a_later_group_adds_to_them(run: Any) -> None:
    body = f"wgmma_fence(); {PRODUCT} wgmma_commit(); {PRODUCT} wgmma_commit(); wgmma_wait<1>();\n"
    body += "for (int i = 0; i < 32; ++i) e[i] = d[i]; wgmma_wait<0>();\n"
    assert (results(run, body) == 33).all()
    assert np.isnan(results(run, body + "for (int i = 0; i < 32; ++i) d[i] = e[i];")).all()


def test_results_that_nobody_waited_for_are_nan(run: Any) -> None:
    assert np.isnan(
        results(run, f"wgmma_fence(); {PRODUCT} wgmma_commit(); wgmma_wait<1>();" + RESULT + "wgmma_wait<0>(); return;")
    ).all()


@pytest.mark.parametrize("rest", ["", "wgmma_commit();", "wgmma_commit(); wgmma_wait<1>();", "wgmma_wait<0>();"])
def test_returning_with_a_product_under_way_is_a_finding(run: Any, rest: str) -> None:
    text = finding(run, f"wgmma_fence();\n{PRODUCT}{rest}")
    assert text.startswith("missing wait: this lane returned from the kernel with 1 wgmma in flight")


def test_the_first_product_needs_a_fence(run: Any) -> None:
    text = finding(run, f"\n{PRODUCT} wgmma_commit(); wgmma_wait<0>();")
    assert text.startswith("missing fence: no wgmma_fence since the kernel began")
    assert "kernels/test.cu:2" in text


def test_products_after_a_wait_need_another_fence(run: Any) -> None:
    again = f"{PRODUCT} wgmma_commit(); wgmma_wait<0>();\n"
    text = finding(run, f"wgmma_fence();\n{again}for (int i = 0; i < 32; ++i) d[i] *= 2.0f;\n{again}")
    assert text.startswith("missing fence: no wgmma_fence since the last wgmma_wait")
    assert "kernels/test.cu:4" in text


def test_accumulators_written_after_the_fence_are_a_finding_in_race_mode(run: Any) -> None:
    again = f"{PRODUCT} wgmma_commit(); wgmma_wait<0>();\n"
    early = f"wgmma_fence();\n{again}for (int i = 0; i < 32; ++i) d[i] *= 2.0f;\nwgmma_fence();\n{again}"
    late = f"wgmma_fence();\n{again}wgmma_fence();\nfor (int i = 0; i < 32; ++i) d[i] *= 2.0f;\n{again}"
    assert (results(run, early, race=True) == 2 * 17 + 16).all()
    text = finding(run, late, race=True)
    assert text.startswith("missing fence: the accumulators changed between the last wgmma_fence and this wgmma")
    assert "kernels/test.cu:5" in text


def test_a_left_operand_written_after_the_fence_is_a_finding_in_race_mode(run: Any) -> None:
    body = """u32 left[4];
    for (u32 round = 0; round < 2; ++round) {
      BEFORE
      for (int i = 0; i < 4; ++i) left[i] = 0x3f803f80 * (round + 1);
      AFTER
      wgmma_rs<bfloat16_t, 64>(d, left, b, true);
      wgmma_commit();
      wgmma_wait<0>();
    }"""
    results(run, body.replace("BEFORE", "").replace("AFTER", "wgmma_fence();"), race=True)
    text = finding(run, body.replace("BEFORE", "wgmma_fence();").replace("AFTER", ""), race=True)
    assert text.startswith("missing fence: the left operand's registers changed")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("matrix_descriptor(base + 8, 16, 1024, Swizzle::none);", "misaligned: a matrix descriptor needs an address"),
        ("matrix_descriptor(base, 8, 1024, Swizzle::none);", "invalid operand: leading_bytes=8 of a matrix"),
        ("matrix_descriptor(base, 16, 1 << 18, Swizzle::none);", "invalid operand: stride_bytes=262144 of a matrix"),
        (
            "wgmma_ss<bfloat16_t, 64>(d, a, b.advanced(128), true);",
            "misaligned: the right operand starts at offset 8320 of shared memory, in line 1 of its 128-byte swizzle",
        ),
        (
            "wgmma_ss<bfloat16_t, 64>(d, a.advanced(112), b, true);",
            "misaligned: the left operand starts 112 bytes into the lines of its 128-byte swizzle",
        ),
        (
            "wgmma_ss<bfloat16_t, 64>(d, a, b.advanced(1024), true);",
            "shared memory out of bounds: wgmma's right operand touches 16 bytes at offset 16384 of 16384",
        ),
        (
            "wgmma_ss<bfloat16_t, 64>(d, MatrixDescriptor{a.low | 1u << 14, a.high}, b, true);",
            "invalid operand: the left operand's descriptor",
        ),
        (
            "wgmma_ss<bfloat16_t, 64>(d, MatrixDescriptor{a.low, a.high | 1u << 17}, b, true);",
            "invalid operand: the left operand's descriptor",
        ),
    ],
)
def test_a_descriptor_that_leads_astray_is_a_finding_at_its_line(run: Any, body: str, message: str) -> None:
    text = finding(run, f"wgmma_fence();\n\n{body}")
    assert text.startswith(message)
    assert "kernels/test.cu:3" in text


def test_wrong_strides_give_wrong_results(run: Any) -> None:
    mark = "halves[16 * 64] = 0;\nblock_sync();\n"
    tail = "wgmma_commit(); wgmma_wait<0>();"
    right = results(run, f"{mark}wgmma_fence(); {PRODUCT} {tail}")
    wrong = results(
        run,
        mark
        + "wgmma_fence(); wgmma_ss<bfloat16_t, 64>(d, matrix_descriptor(base, 16, 512, Swizzle::bytes_128), b, true);"
        + tail,
    )
    assert not np.array_equal(right, wrong)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("wgmma_ss<bfloat16_t, 64>(d, t < 70 ? a : b, b, true);", "the left operand's descriptor is 0x"),
        ("wgmma_ss<bfloat16_t, 64>(d, a, b, t < 70);", "accumulate is "),
        (
            "wgmma_ss<bfloat16_t, 64>(t < 70 ? d : e, a, b, true);\nwgmma_ss<bfloat16_t, 64>(d, a, b, true);",
            "adds to other",
        ),
        (
            f"if (t < 70) {{\n{PRODUCT} }} else {{\n{PRODUCT} }}",
            "were at another",
        ),
        (
            "if (t < 70) wgmma_commit();\nwgmma_ss<bfloat16_t, 64>(d, a, b, true);\nwgmma_commit();",
            "commits its group 1 after",
        ),
    ],
)
def test_lanes_that_do_not_agree_are_a_finding(run: Any, body: str, message: str) -> None:
    text = finding(run, f"wgmma_fence();\n{body}wgmma_commit(); wgmma_wait<0>();")
    assert text.startswith("divergent warpgroup: ")
    assert message in text


def test_a_warp_that_leaves_the_product_out_is_a_deadlock(run: Any) -> None:
    text = finding(run, f"wgmma_fence();\nif (t < 96) {{ {PRODUCT}\nwgmma_commit();\nwgmma_wait<0>(); }}")
    assert text.startswith("deadlock: no thread can run:")
    assert "96 threads (warps 0 1 2) wait at test.cu:4, wgmma_wait (96 of its warpgroup's 128 lanes have issued" in text
    assert "the wgmma at test.cu:2)" in text


def test_half_a_warpgroup_is_a_finding(run: Any) -> None:
    text = finding(run, f"wgmma_fence();\n{PRODUCT}", threads=64)
    assert text.startswith("divergent warpgroup: wgmma needs four warps; the block's last warpgroup has only 2")


def test_accumulators_under_way_cannot_take_another_width(run: Any) -> None:
    text = finding(
        run, f"wgmma_fence();\n{PRODUCT}\nwgmma_ss<bfloat16_t, 8>(reinterpret_cast<float(&)[4]>(d), a, b, true);"
    )
    assert text.startswith("missing wait: these accumulators still belong to a wgmma of 64 columns")


OVERWRITE = f"wgmma_fence(); {PRODUCT} wgmma_commit();\nhalves[t] = 0;\nwgmma_wait<0>();"


def test_an_operand_that_is_overwritten_too_early_changes_the_results(run: Any) -> None:
    assert not (results(run, OVERWRITE) == 17).all()


def test_an_operand_that_is_overwritten_too_early_is_a_race(run: Any) -> None:
    text = finding(run, OVERWRITE, race=True)
    assert text.startswith("race: a store of 2 bytes at offset")
    assert "and a wgmma touch the same bytes; it may still be in flight" in text
    assert "kernels/test.cu:2" in text
    assert "kernels/test.cu:1" in text


def test_an_operand_must_be_written_before_in_race_mode(run: Any) -> None:
    body = f"halves[t] = 0x3f80; fence_proxy_async();\nwgmma_fence(); {PRODUCT} wgmma_commit(); wgmma_wait<0>();"
    text = finding(run, body, race=True)
    # Which of the two comes first depends on the schedule.
    assert text.startswith(("race: a wgmma of 16 bytes at offset", "race: a store of 2 bytes at offset"))
    assert "kernels/test.cu:1" in text
    assert "kernels/test.cu:2" in text


REWRITE = f"halves[t] = 0x3f80;\nFENCE\nblock_sync();\nwgmma_fence(); {PRODUCT} wgmma_commit(); wgmma_wait<0>();"


def test_what_threads_stored_needs_a_proxy_fence_before_the_barrier(run: Any) -> None:
    results(run, REWRITE.replace("FENCE", "fence_proxy_async();"), race=True)
    # Without race mode nothing is seen of it.
    results(run, REWRITE.replace("FENCE", ""))
    text = finding(run, REWRITE.replace("FENCE", ""), race=True)
    assert text.startswith("missing fence: a wgmma of 16 bytes at offset")
    assert "call fence_proxy_async after writing" in text
    assert "kernels/test.cu:4" in text
    assert "kernels/test.cu:1" in text


def test_one_threads_fence_does_not_serve_the_others(run: Any) -> None:
    text = finding(run, REWRITE.replace("FENCE", "if (t == 0) fence_proxy_async();"), race=True)
    assert text.startswith("missing fence: a wgmma")


#: Warpgroup 0 multiplies; its first thread alone then tells warpgroup 1, which overwrites an operand.
HAND_OVER = f"""if (t < 128) {{
  wgmma_fence(); {PRODUCT} wgmma_commit();
  READ
  wgmma_wait<0>();
  if (t == 0) store_release(flag, 1);
}} else {{
  while (load_acquire(flag) == 0) {{}}
  halves[t] = 0;
  return;
}}"""


def test_one_thread_may_hand_over_what_only_products_read(run: Any) -> None:
    out = results(run, HAND_OVER.replace("READ", ""), threads=256, race=True, flag=np.zeros(1, np.uint32))
    assert (out == 17).all()


def test_one_thread_may_not_hand_over_what_others_load(run: Any) -> None:
    body = HAND_OVER.replace("READ", "if (t == 64) e[0] = halves[150];").replace("d[i];", "d[i] + 0 * e[0];")
    text = finding(run, body + "\nif (e[0] == 3.0f) return;", threads=256, race=True, flag=np.zeros(1, np.uint32))
    assert text.startswith("race: a store of 2 bytes")
    assert "and a load touch the same bytes" in text
    assert "warp 2, lane 0" in text
