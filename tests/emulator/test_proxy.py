"""Race mode and asynchronous copies: fences, waits and barriers that results seldom miss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError
from flashgen.launch.driver.tensor_map import TensorMap

SCHEDULES = ["sequential", "reverse", "random", "priority"]
SETUP = """const int t = thread_idx(), warp = t / 32;
const u32 bar = shared_address(shared), data = bar + 64;
auto* f = reinterpret_cast<float*>(shared + 64);
if (t == 0) { mbarrier_init(bar, 1); mbarrier_init(bar + 8, 1); fence_mbarrier_init(); }
block_sync();
"""


def floats(count: int, value: float = 0) -> np.ndarray[Any, Any]:
    """At an address that is a multiple of 16."""
    storage = np.zeros(count + 4, np.float32)
    array = storage[-storage.ctypes.data // 4 % 4 :][:count]
    array[...] = value
    return array


def passes(run: Any, body: str, **options: Any) -> None:
    for schedule in SCHEDULES:
        run(SETUP + body, **{"smem": 1024, "threads": 64, "race": True, "schedule": schedule, "seed": 3, **options})


def finding(run: Any, body: str, **options: Any) -> str:
    """The same kind under every schedule."""
    texts = []
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            run(SETUP + body, **{"smem": 1024, "threads": 64, "race": True, "schedule": schedule, "seed": 3, **options})
        texts.append(str(caught.value))
    assert len({text.split(":")[0] for text in texts}) == 1, texts
    return texts[0]


# ---- Ordinary writes, then asynchronous reads

STORE = """if (t < 16) f[t] = t;
{writer}
block_sync();
{reader}
if (t == 32) {{
{store};
bulk_commit();
bulk_wait_read<0>();
}}"""


@pytest.mark.parametrize(
    "fences",
    [
        {"writer": "fence_proxy_async();", "reader": ""},
        {"writer": "fence_proxy_async_shared();", "reader": ""},
        {"writer": "", "reader": "if (t == 32) fence_proxy_async();"},
        {"writer": "block_sync(); if (t == 5) fence_proxy_async();", "reader": ""},
    ],
)
def test_a_fence_on_the_way_from_writer_to_copy_is_enough(run: Any, fences: dict[str, str]) -> None:
    passes(run, STORE.format(store="bulk_store(out, data, 64)", **fences), out=floats(16))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("", ""),
        ("if (t != 3) fence_proxy_async();", ""),
        ("fence_proxy_async(); if (t == 4) f[4] = 8;", ""),
        ("", "if (t == 33) fence_proxy_async();"),
        ("", "if (t == 32) { fence_mbarrier_init(); }"),
    ],
)
@pytest.mark.parametrize("store", ["bulk_store(out, data, 64)", "bulk_reduce_add(out, data, 64)"])
def test_a_copy_of_what_was_not_fenced_is_a_finding(run: Any, store: str, writer: str, reader: str) -> None:
    text = finding(run, STORE.format(store=store, writer=writer, reader=reader), out=floats(16))
    assert text.startswith("missing fence: a bulk copy (its source) of 64 bytes at offset 64 of shared memory")
    assert "at kernels/test.cu:11" in text
    assert "  the store:\n  at kernels/test.cu:" in text


def test_a_tma_store_needs_the_fence_too_but_only_for_what_lies_in_the_tensor(run: Any) -> None:
    out = floats(32)
    m = TensorMap(out.ctypes.data, "fp32", (16, 2), (64,), (16, 4))
    tile = SETUP.replace("data = bar + 64", "data = bar + 128").replace("shared + 64", "shared + 128")
    body = (
        tile
        + """if (t < {count}) f[t] = 1;
    {fence}
    block_sync();
    if (t == 0) {{ tma_store_2d(map, data, 0, 0); bulk_commit(); bulk_wait_read<0>(); }}"""
    )
    body = body.replace("if (t == 0) { mbarrier_init", "if (t == 0) {{ mbarrier_init").replace(
        "init(); }\n", "init(); }}\n"
    )
    options = {"threads": 64, "smem": 1024, "race": True, "maps": {"map": m}, "out": out}
    run(body.format(count=32, fence="fence_proxy_async();"), **options)
    with pytest.raises(EmulationError, match="missing fence: a bulk copy"):
        run(body.format(count=32, fence=""), **options)
    with pytest.raises(EmulationError, match="uninitialised shared memory: a bulk copy"):
        run(body.format(count=31, fence="fence_proxy_async();"), **options)


def test_a_fence_after_cp_async_is_needed_after_the_wait(run: Any) -> None:
    body = """if (t < 4) cp_async_16(data + 16 * t, x + 4 * t, 16);
    cp_async_commit();
    {early}
    cp_async_wait<0>();
    {late}
    block_sync();
    if (t == 0) {{ bulk_store(out, data, 64); bulk_commit(); bulk_wait_read<0>(); }}"""
    arrays = {"x": floats(16, 2), "out": floats(16)}
    passes(run, body.format(early="", late="fence_proxy_async();"), **arrays)
    for fence in ({"early": "", "late": ""}, {"early": "fence_proxy_async();", "late": ""}):
        assert finding(run, body.format(**fence), **arrays).startswith("missing fence:")


def test_what_a_load_brought_needs_no_fence_before_it_is_stored(run: Any) -> None:
    body = """if (t == 0) {
      mbarrier_arrive_expect_tx(bar, 64);
      bulk_load(data, x, 64, bar);
      mbarrier_wait(bar, 0);
      bulk_store(out, data, 64);
      bulk_commit();
      bulk_wait<0>();
    }"""
    out = floats(16)
    passes(run, body, x=floats(16, 2), out=out)
    assert (out == 2).all()


def test_a_load_over_ordinary_writes_needs_a_fence(run: Any) -> None:
    body = """f[t] = 1;
    {fence}
    block_sync();
    if (t == 0) {{ mbarrier_arrive_expect_tx(bar, 64); bulk_load(data, x, 64, bar); }}
    mbarrier_wait(bar, 0);"""
    passes(run, body.format(fence="fence_proxy_async();"), x=floats(16))
    text = finding(run, body.format(fence=""), x=floats(16))
    assert text.startswith("missing fence: a bulk load of 64 bytes at offset 64")


def test_global_memory_needs_the_fence_as_well(run: Any) -> None:
    body = """if (t < 16) out[t] = 5;
    {fence}
    block_sync();
    if (t == 0) {{ mbarrier_arrive_expect_tx(bar, 64); bulk_load(data, out, 64, bar); }}
    mbarrier_wait(bar, 0);"""
    passes(run, body.format(fence="fence_proxy_async();"), out=floats(16))
    assert finding(run, body.format(fence=""), out=floats(16)).startswith("missing fence: a bulk copy (its source)")


# ---- Loads and who may touch their destination

LOAD = """if (t == 0) { mbarrier_arrive_expect_tx(bar, 64); bulk_load(data, x, 64, bar); }
"""


def test_who_waits_may_read(run: Any) -> None:
    passes(run, LOAD + "mbarrier_wait(bar, 0);\nif (t < 16) out[t] = f[t];", x=floats(16), out=floats(16))


def test_who_learns_from_one_who_waited_may_read(run: Any) -> None:
    body = LOAD + "if (t == 40) mbarrier_wait(bar, 0);\nblock_sync();\nif (t < 16) out[t] = f[t];"
    passes(run, body, x=floats(16), out=floats(16))


def test_one_who_waited_does_not_speak_for_others(run: Any) -> None:
    body = LOAD + "block_sync();\nif (warp == 1) mbarrier_wait(bar, 0);\nif (t == 3) out[t] = f[t];"
    texts = set()
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            run(SETUP + body, threads=64, smem=1024, race=True, schedule=schedule, seed=1, x=floats(16), out=floats(16))
        texts.add(str(caught.value).split(";")[0])
        assert "at kernels/test.cu:9" in str(caught.value)
    assert texts <= {
        "missing wait: a load of 4 bytes at offset 76 of shared memory touches bytes that a bulk load still has in"
        " flight",
        "race: a load of 4 bytes at offset 76 of shared memory and a bulk load touch the same bytes",
    }


def test_reading_before_the_wait_is_a_finding(run: Any) -> None:
    text = finding(run, LOAD + "block_sync();\nif (t == 3) out[t] = f[t];", x=floats(16), out=floats(16))
    assert text.startswith(
        "missing wait: a load of 4 bytes at offset 76 of shared memory touches bytes that a bulk load"
    )
    assert "no thread has waited at its mbarrier" in text
    assert "  the bulk load:\n  at kernels/test.cu:6" in text


def test_writing_before_the_wait_is_a_finding(run: Any) -> None:
    assert finding(run, LOAD + "block_sync();\nif (t == 3) f[t] = 1;", x=floats(16)).startswith("missing wait: a store")


def test_two_loads_into_one_place_without_a_wait_between_are_a_finding(run: Any) -> None:
    body = "if (t == 0) {\nmbarrier_arrive_expect_tx(bar, 128);\n" + 2 * "bulk_load(data, x, 64, bar);\n" + "}"
    assert finding(run, body + "mbarrier_wait(bar, 0);", x=floats(16)).startswith(
        "missing wait: a bulk load of 64 bytes"
    )


def test_readers_are_waited_for_before_a_load_overwrites_them(run: Any) -> None:
    body = """if (warp == 0) {
      for (int i = 0; i < 3; ++i) {
        mbarrier_wait(bar, i & 1);
        out[t] = f[t % 16];
        {release}
      }
    } else if (t == 32) {
      for (int i = 0; i < 3; ++i) {
        {acquire}
        mbarrier_arrive_expect_tx(bar, 64);
        bulk_load(data, x, 64, bar);
      }
    }"""
    acquire = "if (i > 0) mbarrier_wait(bar + 8, (i & 1) ^ 1);"
    good = body.replace("{acquire}", acquire).replace("{release}", "warp_sync(); if (t == 0) mbarrier_arrive(bar + 8);")
    passes(run, good, x=floats(16), out=floats(32))
    # One lane speaks for its warp before the others have read.
    early = body.replace("{acquire}", acquire).replace("{release}", "if (t == 0) mbarrier_arrive(bar + 8);")
    with pytest.raises(EmulationError) as caught:
        run(SETUP + early, threads=64, smem=1024, race=True, x=floats(16), out=floats(32))
    assert str(caught.value).startswith("race: a bulk load of 64 bytes at offset 64 of shared memory and a load touch")


# ---- Stores and who may touch their source


def test_the_source_may_be_written_again_after_the_wait(run: Any) -> None:
    body = """if (t < 16) f[t] = t;
    fence_proxy_async();
    block_sync();
    if (t == 0) { bulk_store(out, data, 64); bulk_commit(); bulk_wait_read<0>(); }
    block_sync();
    if (t < 16) f[t] = 0;"""
    out = floats(16)
    passes(run, body, out=out)
    np.testing.assert_array_equal(out, np.arange(16))
    text = finding(run, body.replace("bulk_wait_read<0>(); }", "}").replace("= 0;", "= 0; bulk_wait<0>();"), out=out)
    assert text.startswith(
        "missing wait: a store of 4 bytes at offset 64 of shared memory overwrites what an asynchronous"
    )
    assert "  the bulk copy (its source):\n  at kernels/test.cu:9" in text


def test_a_wait_of_one_thread_does_not_speak_for_others(run: Any) -> None:
    body = """if (t < 16) f[t] = t;
    fence_proxy_async();
    block_sync();
    if (t == 0) { bulk_store(out, data, 64); bulk_commit(); bulk_wait_read<0>(); }
    if (t == 5) f[t] = 0;"""
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            run(SETUP + body, threads=64, smem=1024, race=True, schedule=schedule, out=floats(16))
        assert str(caught.value).startswith("race:")


def test_reading_the_source_meanwhile_is_no_race(run: Any) -> None:
    body = """if (t < 16) f[t] = t;
    fence_proxy_async();
    block_sync();
    if (t == 0) { bulk_store(out, data, 64); bulk_commit(); }
    if (t == 40) seen[0] = f[3];
    if (t == 0) bulk_wait_read<0>();"""
    passes(run, body, out=floats(16), seen=floats(1))


def test_what_a_store_writes_is_not_read_before_the_full_wait(run: Any) -> None:
    body = """if (t < 16) f[t] = t;
    fence_proxy_async();
    block_sync();
    if (t == 0) { bulk_store(out, data, 64); bulk_commit(); bulk_wait{read}<0>(); seen[0] = out[3]; }"""
    passes(run, body.replace("{read}", ""), out=floats(16), seen=floats(1))
    text = finding(run, body.replace("{read}", "_read"), out=floats(16), seen=floats(1))
    assert text.startswith("missing wait: a load of 4 bytes at")
    assert "touches bytes that a bulk store still has in flight" in text


def test_stores_of_two_blocks_to_one_place_race_and_reductions_do_not(run: Any) -> None:
    body = """if (t < 16) f[t] = t;
    fence_proxy_async();
    block_sync();
    if (t == 0) { {call}(out, data, 64); bulk_commit(); bulk_wait<0>(); }"""
    passes(run, body.replace("{call}", "bulk_reduce_add"), blocks=3, out=floats(16))
    text = finding(run, body.replace("{call}", "bulk_store"), blocks=3, out=floats(16))
    assert "they are by different blocks" in text


def test_a_block_reads_what_an_earlier_launch_of_it_stored(run: Any) -> None:
    out = floats(16)
    for value in (3, 4):
        body = f"""if (t < 16) f[t] = {value};
        fence_proxy_async();
        block_sync();
        if (t == 0) {{ bulk_store(out, data, 64); bulk_commit(); bulk_wait_read<0>(); }}"""
        passes(run, body, out=out)
        assert (out == value).all()


# ---- What other blocks wrote

WRITES = {
    "store": "if (t == 0) for (int i = 0; i < 16; ++i) sums[i] = 5;",
    "reduction": "if (t == 0) for (int i = 0; i < 16; ++i) reduce_add(sums + i, 5.0f);",
    "bulk store": "if (t == 0) { bulk_store(sums, data, 64); bulk_commit(); bulk_wait<0>(); }",
    "bulk reduction": "if (t == 0) { bulk_reduce_add(sums, data, 64); bulk_commit(); bulk_wait<0>(); }",
}
READS = {
    "load": "mbarrier_arrive_expect_tx(bar, 64); bulk_load(data, sums, 64, bar); mbarrier_wait(bar, 0);",
    "reduction": "bulk_reduce_add(sums, data, 64); bulk_commit(); bulk_wait<0>();",
    "store": "bulk_store(sums, data, 64); bulk_commit(); bulk_wait<0>();",
}
BLOCKS = """if (t < 16) f[t] = 5;
fence_proxy_async();
block_sync();
if (block_idx_x() == 0) {{
  {write}
  {writer}
  if (t == 0) store_release(flag, 1u);
}} else {{
  if (t == 0) while (load_acquire(flag) == 0) {{}}
  {reader}
  block_sync();
  if (t == 32) {{ {read} }}
}}"""


def blocks(write: str, read: str, writer: str = "", reader: str = "") -> str:
    return BLOCKS.format(write=WRITES[write], read=READS[read], writer=writer, reader=reader)


def two_blocks() -> dict[str, Any]:
    return {"blocks": 2, "cooperative": True, "sums": floats(16), "flag": np.zeros(1, np.uint32)}


@pytest.mark.parametrize("fence", ["fence_proxy_async", "fence_proxy_async_global"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_a_fence_behind_the_acquire_shows_what_another_block_wrote(run: Any, write: str, read: str, fence: str) -> None:
    body = blocks(write, read, reader=f"if (t == 0) {fence}();")
    for schedule in SCHEDULES:
        run(SETUP + body, smem=1024, threads=64, race=True, schedule=schedule, seed=3, **two_blocks())


@pytest.mark.parametrize(
    "fences",
    [
        {},
        # The block that uses the async proxy is not the one with the fence.
        {"writer": "fence_proxy_async();"},
        # Shared memory is not what the other block wrote.
        {"reader": "if (t == 0) fence_proxy_async_shared();"},
        # This thread knows nothing yet.
        {"reader": "if (t == 32) fence_proxy_async();"},
    ],
)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_without_such_a_fence_it_need_not_be_seen(run: Any, write: str, read: str, fences: dict[str, str]) -> None:
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            run(
                SETUP + blocks(write, read, **fences),
                smem=1024,
                threads=64,
                race=True,
                schedule=schedule,
                seed=3,
                **two_blocks(),
            )
        assert str(caught.value).startswith("missing fence:")
        assert "call fence_proxy_async in this block, after the acquire" in str(caught.value)


def test_ordinary_reads_of_what_another_block_copied_need_no_fence(run: Any) -> None:
    body = blocks("bulk reduction", "load").replace(READS["load"], "seen[0] = sums[3];")
    seen = floats(1)
    for schedule in SCHEDULES:
        options = {"smem": 1024, "threads": 64, "race": True, "schedule": schedule, "seed": 3}
        run(SETUP + body, seen=seen, **options, **two_blocks())
        assert seen[0] == 5
