"""What planted bugs are planted in: specs, lengths and inputs that make each of them show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.expr import Traced, log, parse, tanh, where
from flashgen.expr.tree.build import as_node
from flashgen.spec import AttentionSpec, BackwardSchedule, Mask, Schedule, Score, WarpPartition, causal, window
from flashgen.verify.cases.packed import Packing


def capped(cap: float, sink: float | None, steepness: float = 1.0) -> Score:
    """A softcap and a sink that capture nothing."""
    code = f"tanh(s * {steepness / cap}) * {cap}"
    return Score(Traced(parse(code, {}, score=True)), None if sink is None else Traced(as_node(sink)))


RING = Schedule(
    tile_q=64,
    tile_kv=32,
    stages=3,
    warps=WarpPartition("split_q", 4),
    backward=BackwardSchedule(tile_q=32, tile_kv=64, warps=4, stages=2),
)
ONE_STAGE = Schedule(
    tile_q=64,
    tile_kv=32,
    stages=1,
    warps=WarpPartition("split_q", 4),
    backward=BackwardSchedule(tile_q=32, tile_kv=64, warps=4, stages=1),
)
NAIVE = Schedule(algorithm="naive")
FA1 = Schedule(algorithm="fa1", tile_q=64, tile_kv=64, backward=BackwardSchedule(tile_q=32, tile_kv=64, warps=4))
GRID1D = Schedule(algorithm="grid1d", tile_q=32, tile_kv=32)
GRID2D = Schedule(algorithm="grid2d", tile_q=32, tile_kv=32)
SPLIT_K = Schedule(tile_q=32, tile_kv=64, warps=WarpPartition("split_k", 4))

STANDARD = Schedule(algorithm="standard")

DECODE = AttentionSpec(64, dtype="fp16", mask=causal(), direction="forward", cache="paged")
EIGHT_BITS = AttentionSpec(64, dtype="e4m3", direction="forward")
QUANTIZED = AttentionSpec(128, dtype="e4m3", out_dtype="fp16", scale_block=64, direction="forward")
E4M3 = replace(DECODE, dtype="bf16", cache_dtype="e4m3")
QUERIES_TOO = replace(E4M3, dtype="e4m3", out_dtype="fp16")
LATENT = AttentionSpec(16, head_dim_v=64, dtype="fp16", mask=causal(), direction="forward", cache="paged", qv=True)
LATENT_SM90 = replace(LATENT, head_dim_v=128)

PACKING = Packing(((70, 120), (40, 33), (0, 20), (12, 0)), ((50, 120), (30, 20), (0, 20), (12, 0)), True)
#: Sequences of two tiles and more, of one row, of no queries and of no keys. Some do not use all of their rows.
PACKING_LONG = Packing(
    ((300, 330), (1, 40), (0, 20), (12, 0), (140, 200)), ((290, 330), (1, 30), (0, 20), (12, 0), (139, 180)), True
)
PACKING_MANY = Packing(((40, 40),) * 40, ((40, 40),) * 40, True)
#: Of the second sequence, two of three tiles of keys are not used.
PACKING_UNUSED = Packing(((20, 30), (64, 300), (70, 20)), ((20, 30), (64, 100), (70, 20)), True)
#: name -> (spec, (len_q, len_kv), further fields of a Case)
CASES: dict[str, tuple[AttentionSpec, tuple[int, int], dict[str, Any]]] = {
    # Keys minus queries are 30: some tiles of keys end one past the diagonal of the tile of queries.
    "ring": (AttentionSpec(64, mask=causal()), (100, 130), {"schedule": RING}),
    # O is larger than Q, and the last of four tiles of keys lies right behind Q.
    "wide values": (AttentionSpec(64, head_dim_v=96), (100, 120), {"schedule": RING}),
    "one stage": (AttentionSpec(64, mask=causal()), (100, 147), {"schedule": ONE_STAGE}),
    "turing": (
        AttentionSpec(64, dtype="fp16", mask=causal()),
        (100, 147),
        {"schedule": ONE_STAGE, "arch": "sm_75"},
    ),
    "split k": (AttentionSpec(64, mask=causal()), (40, 147), {"schedule": SPLIT_K}),
    "grouped": (AttentionSpec(64), (70, 75), {"schedule": RING, "heads": 4, "batch": 2}),
    "empty rows": (AttentionSpec(64, mask=causal()), (100, 60), {"schedule": RING}),
    "deterministic": (AttentionSpec(64, deterministic=True), (100, 147), {"schedule": RING}),
    "masked, deterministic": (AttentionSpec(64, mask=causal(), deterministic=True), (100, 147), {"schedule": RING}),
    "dropout": (AttentionSpec(64, mask=causal(), dropout=True), (70, 90), {"heads": 4, "batch": 2}),
    "dropout, deterministic": (AttentionSpec(64, deterministic=True, dropout=True), (40, 75), {}),
    # Some sequences use all of their rows, others do not; one has no queries, one no keys.
    "packed": (
        AttentionSpec(64, mask=causal(), varlen=True),
        (70, 120),
        {"packing": PACKING, "batch": 4, "schedule": RING},
    ),
    # New keys come into pages, and queries attend in splits.
    "cached": (
        AttentionSpec(16, dtype="fp32", mask=causal(), direction="forward", cache="paged"),
        (9, 56),
        {"schedule": Schedule(tile_q=32, tile_kv=16, stages=2, warps=WarpPartition("split_q", 2)), "heads": 4},
    ),
    "cached, huge page stride": (
        AttentionSpec(16, dtype="fp32", mask=causal(), direction="forward", cache="paged"),
        (9, 56),
        {"schedule": Schedule(tile_q=32, tile_kv=16, stages=2), "huge_stride": "huge-batch-stride"},
    ),
    # Twelve rows of a tile: three new tokens, times four query heads of a group.
    "decode": (DECODE, (3, 0), {"heads": 8, "heads_kv": 2}),
    # Three blocks of rows, so that the warps split the rows.
    "decode, many rows": (DECODE, (9, 0), {"heads": 8, "heads_kv": 2}),
    # Blocks compute several parts.
    "decode, parts": (DECODE, (3, 0), {"heads": 8, "heads_kv": 2, "splits": 3, "multiprocessors": 3}),
    # More parts than a merge loads at once.
    "decode, many parts": (replace(DECODE, head_dim=256, head_dim_v=256), (3, 0), {"heads_kv": 1, "splits": 11}),
    "decode, sink": (replace(DECODE, score=capped(9.0, 6.0)), (3, 0), {"heads": 8, "heads_kv": 2}),
    "decode, 8 bits": (E4M3, (3, 0), {"heads": 8, "heads_kv": 2}),
    "decode, 8 bits, also of queries": (QUERIES_TOO, (3, 0), {"heads": 8, "heads_kv": 2}),
    "prefill on Hopper, 8 bits": (
        replace(QUERIES_TOO, mask=causal()),
        (70, 0),
        {"heads": 4, "heads_kv": 2, "page_size": 24, "multiprocessors": 1, "arch": "sm_90a"},
    ),
    "decode, 8 bits, scales of pages": (replace(E4M3, page_scales=True), (3, 0), {"heads": 8, "heads_kv": 2}),
    "decode, 8 bits, non-finite value": (E4M3, (3, 0), {"heads": 8, "heads_kv": 2, "infinite_value_from_end": 1}),
    # The last token alone attends to the last value, which is NaN.
    "decode, non-finite value": (DECODE, (3, 0), {"heads": 8, "heads_kv": 2, "infinite_value_from_end": 1}),
    "decode on Hopper": (DECODE, (3, 0), {"heads": 8, "heads_kv": 2, "arch": "sm_90a"}),
    # A block computes more tiles than its ring has stages.
    "decode on Hopper, few blocks": (
        DECODE,
        (3, 0),
        {"heads": 8, "heads_kv": 2, "multiprocessors": 2, "arch": "sm_90a"},
    ),
    "decode on Hopper, parts": (
        DECODE,
        (3, 0),
        {"heads": 8, "heads_kv": 2, "splits": 3, "multiprocessors": 3, "arch": "sm_90a"},
    ),
    "decode on Hopper, non-finite value": (
        DECODE,
        (3, 0),
        {"heads": 8, "heads_kv": 2, "infinite_value_from_end": 1, "arch": "sm_90a"},
    ),
    # Each page has three boxes, and one block computes more tiles than are announced at once.
    "prefill on Hopper": (DECODE, (200, 0), {"page_size": 24, "multiprocessors": 1, "arch": "sm_90a"}),
    # Five tiles of rows: two rounds of teams of three blocks, one of which has no rows at the end.
    "latent": (LATENT, (3, 0), {"heads": 48, "heads_kv": 1}),
    "latent, parts": (LATENT, (3, 0), {"heads": 48, "heads_kv": 1, "splits": 3, "multiprocessors": 6}),
    "latent, non-finite value": (LATENT, (3, 0), {"heads": 48, "heads_kv": 1, "infinite_value_from_end": 1}),
    "latent on Hopper": (LATENT_SM90, (3, 0), {"heads": 48, "heads_kv": 1, "arch": "sm_90a"}),
    "latent on Hopper, non-finite value": (
        LATENT_SM90,
        (3, 0),
        {"heads": 48, "heads_kv": 1, "infinite_value_from_end": 1, "arch": "sm_90a"},
    ),
    # Two blocks of rows, and three of keys.
    "e4m3": (EIGHT_BITS, (100, 150), {"arch": "sm_89", "heads": 4, "batch": 2}),
    "e4m3, blocks": (replace(EIGHT_BITS, scale_block=64), (100, 150), {"arch": "sm_89", "heads": 4, "batch": 2}),
    "e4m3, packed": (
        replace(EIGHT_BITS, scale_block=64, varlen=True),
        (70, 120),
        {"arch": "sm_89", "packing": PACKING, "batch": 4},
    ),
    "e4m3, non-finite value": (
        replace(EIGHT_BITS, mask=causal()),
        (40, 40),
        {"arch": "sm_89", "infinite_value_from_end": 1},
    ),
    # Two lanes share a row. There are two blocks of threads, and the last block of queries and of keys is cut.
    "quantize": (QUANTIZED, (290, 70), {"heads": 4, "batch": 2, "arch": "sm_89"}),
    "quantize, packed": (replace(QUANTIZED, varlen=True), (100, 80), {"arch": "sm_89"}),
    "huge row stride": (AttentionSpec(64, dtype="fp16"), (3, 3), {"huge_stride": "huge-row-stride"}),
    "huge row stride, deterministic": (
        AttentionSpec(64, dtype="fp16", deterministic=True),
        (3, 3),
        {"huge_stride": "huge-row-stride"},
    ),
    "huge head stride": (AttentionSpec(64, dtype="fp16"), (3, 3), {"huge_stride": "huge-head-stride"}),
    "three sequences": (AttentionSpec(64, dtype="fp16"), (3, 3), {"batch": 3}),
    "naive": (AttentionSpec(40, dtype="fp16", mask=causal(), direction="forward"), (20, 40), {"schedule": NAIVE}),
    "fa1": (
        AttentionSpec(40, dtype="fp16", mask=causal(), dropout=True),
        (70, 150),
        {"schedule": FA1, "heads": 4, "batch": 2},
    ),
    "grid1d": (AttentionSpec(40, dtype="fp16", mask=causal(), direction="forward"), (40, 90), {"schedule": GRID1D}),
    "grid2d": (AttentionSpec(40, dtype="fp16", mask=causal(), direction="forward"), (30, 50), {"schedule": GRID2D}),
    "grid2d, many blocks": (
        AttentionSpec(40, dtype="fp16", mask=causal(), direction="forward"),
        (70, 130),
        {"schedule": GRID2D},
    ),
    "gradient of LSE": (AttentionSpec(64, dtype="fp16"), (3, 5), {"dlse": True}),
    "Hopper, backward, gradient of LSE": (AttentionSpec(128), (30, 50), {"arch": "sm_90a", "dlse": True}),
    "dropout, many queries": (AttentionSpec(32, direction="forward", dropout=True), (300, 20), {}),
    "dropout, many keys": (AttentionSpec(32, dropout=True), (20, 300), {"heads": 1, "heads_kv": 1}),
    # The mask may leave out any tile, and there is one more than a warp looks at together.
    "many tiles": (
        AttentionSpec(32, mask=Mask.of(lambda b, h, q, k: (q + k) % 2 == 0), direction="forward"),
        (20, 33 * 32),
        {"heads": 1, "heads_kv": 1, "schedule": Schedule(tile_kv=32)},
    ),
    # Tiles of S, rows of P and the ring of each product end where there are no queries, keys or columns any more.
    "standard": (
        AttentionSpec(72, dtype="fp16", mask=causal()),
        (170, 197),
        {"schedule": STANDARD, "heads": 4},
    ),
    "standard, turing": (
        AttentionSpec(72, dtype="fp16", mask=causal()),
        (70, 147),
        {"schedule": STANDARD, "arch": "sm_75"},
    ),
    "standard, empty rows": (AttentionSpec(16, mask=causal()), (40, 20), {"schedule": STANDARD}),
    "standard, dropout": (
        AttentionSpec(32, dtype="fp32", dropout=True),
        (40, 50),
        {"schedule": STANDARD, "heads": 4, "batch": 2},
    ),
    "standard, infinite value": (
        AttentionSpec(32, mask=causal()),
        (60, 60),
        {"schedule": STANDARD, "infinite_value_from_end": 1},
    ),
    "standard, infinite key": (
        AttentionSpec(32, mask=causal()),
        (60, 60),
        {"schedule": STANDARD, "infinite_key_from_end": 1},
    ),
    # A thread of the softmax kernel has more scores than its registers hold, twice.
    "standard, long rows": (
        AttentionSpec(16, direction="forward"),
        (2, 5130),
        {"schedule": STANDARD, "heads": 1, "heads_kv": 1},
    ),
    # Rings go round, and blocks draw tiles: three of queries, with up to four blocks of keys, for each of two heads.
    "Hopper": (AttentionSpec(128, direction="forward"), (300, 400), {"arch": "sm_90a"}),
    # One block of keys, so that nothing but the rings of tiles and of Q holds the producer back.
    "Hopper, short": (AttentionSpec(128, direction="forward"), (900, 60), {"arch": "sm_90a"}),
    "Hopper, causal": (AttentionSpec(128, mask=causal(), direction="forward"), (300, 400), {"arch": "sm_90a"}),
    # A section has 32 heads.
    "Hopper, two sections": (
        AttentionSpec(128, mask=causal(), direction="forward"),
        (200, 60),
        {"arch": "sm_90a", "heads": 33, "heads_kv": 3},
    ),
    # The first blocks and the last ones are cut.
    "Hopper, window": (AttentionSpec(128, mask=window(100, 130), direction="forward"), (400, 400), {"arch": "sm_90a"}),
    # Tiles of 192 queries and 128 keys: consumers skip blocks.
    "Hopper, three consumers": (AttentionSpec(64, mask=causal(), direction="forward"), (500, 520), {"arch": "sm_90a"}),
    # O leaves from registers.
    "Hopper, wide": (AttentionSpec(256, direction="forward"), (300, 200), {"arch": "sm_90a"}),
    "Hopper, running maximum": (
        AttentionSpec(128, direction="forward"),
        (300, 400),
        {"arch": "sm_90a", "schedule": Schedule(softmax="running-max")},
    ),
    "Hopper, block-sparse": (
        AttentionSpec(
            128,
            mask=Mask.of(lambda b, h, q, k: ((q >= 128) & (q < 192)) | ((q // 150 == k // 150) & ((q + k) % 7 != 0))),
            direction="forward",
        ),
        (460, 460),
        {"arch": "sm_90a"},
    ),
    "Hopper, sink": (AttentionSpec(64, direction="forward", score=capped(50.0, 3.0)), (200, 300), {"arch": "sm_90a"}),
    # A tangent's argument is far from zero in the first of each 32 columns alone.
    "Hopper, capped": (
        AttentionSpec(
            64, direction="forward", score=Score.of(lambda s, b, h, q, k: tanh(where(k % 32 < 8, s, s * 0.1)) * 4.0)
        ),
        (200, 300),
        {"arch": "sm_90a"},
    ),
    "Hopper, non-finite values": (
        AttentionSpec(128, mask=causal(), direction="forward"),
        (300, 400),
        {"arch": "sm_90a", "infinite_value_from_end": 1},
    ),
    # A block's first tiles are all right.
    "Hopper, non-finite values, last head": (
        AttentionSpec(128, mask=causal(), direction="forward"),
        (300, 400),
        {"arch": "sm_90a", "heads": 8, "heads_kv": 8, "infinite_value_from_end": 1, "finite_heads": 7},
    ),
    # More tiles follow the first one with non-finite values than are under way.
    "Hopper, non-finite values, many tiles": (
        AttentionSpec(128, mask=causal(), direction="forward"),
        (1160, 1160),
        {"arch": "sm_90a", "heads": 3, "heads_kv": 3, "infinite_value_from_end": 1, "finite_heads": 2},
    ),
    # Two tiles of each head have infinite results, one of them in some rows alone.
    "Hopper, non-finite values, two tiles": (
        AttentionSpec(128, mask=causal(), direction="forward"),
        (300, 400),
        {"arch": "sm_90a", "infinite_value_from_end": 90},
    ),
    # The mask cuts two blocks for a consumer, and the infinite value lies in the second of them.
    "Hopper, non-finite values, two blocks": (
        AttentionSpec(192, mask=causal(), direction="forward"),
        (400, 400),
        {"arch": "sm_90a", "infinite_value_from_end": 90, "heads": 3, "heads_kv": 3},
    ),
    "Hopper, non-finite values, every second": (
        AttentionSpec(128, mask=causal() & Mask.of(lambda b, h, q, k: (q + k) % 2 == 0), direction="forward"),
        (300, 400),
        {"arch": "sm_90a", "infinite_value_from_end": 9},
    ),
    # Logits grow from block to block, in the second row of each lane of every fourth warp.
    # Tiles of 128 keys, and rings of four and of three stages.
    "Hopper, e4m3": (
        EIGHT_BITS,
        (300, 700),
        {"arch": "sm_90a", "heads": 4, "batch": 2},
    ),
    # P has registers once.
    "Hopper, e4m3, 128 columns": (replace(EIGHT_BITS, head_dim=128, head_dim_v=128), (200, 500), {"arch": "sm_90a"}),
    "Hopper, e4m3, wide": (replace(EIGHT_BITS, head_dim=256, head_dim_v=256), (200, 300), {"arch": "sm_90a"}),
    "Hopper, e4m3, blocks": (replace(EIGHT_BITS, scale_block=64), (200, 300), {"arch": "sm_90a"}),
    "Hopper, e4m3, packed": (
        replace(EIGHT_BITS, scale_block=64, varlen=True),
        (70, 120),
        {"arch": "sm_90a", "packing": PACKING, "batch": 4},
    ),
    "Hopper, e4m3, growing": (
        replace(EIGHT_BITS, score=Score.of(lambda s, b, h, q, k: where(q % 16 >= 8, s - k * 0.03, s))),
        (200, 700),
        {"arch": "sm_90a"},
    ),
    "Hopper, e4m3, non-finite value": (
        replace(EIGHT_BITS, mask=causal()),
        (150, 200),
        {"arch": "sm_90a", "infinite_value_from_end": 20},
    ),
    "Hopper, growing": (
        AttentionSpec(
            64,
            direction="forward",
            score=Score.of(lambda s, b, h, q, k: where((q % 64 < 16) & (q % 16 >= 8), s - k * 0.5, s)),
        ),
        (1900, 400),
        {"arch": "sm_90a"},
    ),
    # Each block has one tile.
    "Hopper, growing, few tiles": (
        AttentionSpec(
            64,
            direction="forward",
            score=Score.of(lambda s, b, h, q, k: where((q % 64 < 16) & (q % 16 >= 8), s - k * 0.5, s)),
        ),
        (150, 400),
        {"arch": "sm_90a"},
    ),
    "Hopper, packed": (
        AttentionSpec(128, mask=causal(), varlen=True, direction="forward"),
        (300, 330),
        {"arch": "sm_90a", "packing": PACKING_LONG, "batch": 5},
    ),
    # The scheduler counts the tiles of 32 sequences at a time.
    "Hopper, many packed sequences": (
        AttentionSpec(64, mask=causal(), varlen=True, direction="forward"),
        (40, 40),
        {"arch": "sm_90a", "packing": PACKING_MANY, "batch": 40, "heads": 1, "heads_kv": 1},
    ),
    "Hopper, many packed sequences, non-finite values": (
        AttentionSpec(64, mask=causal(), varlen=True, direction="forward"),
        (40, 40),
        {
            "arch": "sm_90a",
            "packing": PACKING_MANY,
            "batch": 40,
            "heads": 1,
            "heads_kv": 1,
            "infinite_value_from_end": 1,
        },
    ),
    "Hopper, dropout": (
        AttentionSpec(128, mask=causal(), dropout=True, direction="forward"),
        (300, 400),
        {"arch": "sm_90a", "heads": 4, "batch": 2},
    ),
    # Each ring goes round, and blocks draw tiles: three of keys, with up to five of queries, for each of two heads.
    "Hopper, backward": (AttentionSpec(128), (300, 300), {"arch": "sm_90a"}),
    "Hopper, backward, causal": (AttentionSpec(128, mask=causal()), (300, 330), {"arch": "sm_90a"}),
    "Hopper, backward, fp16": (AttentionSpec(64, dtype="fp16"), (200, 200), {"arch": "sm_90a"}),
    "Hopper, backward, ordered": (AttentionSpec(128, deterministic=True), (300, 300), {"arch": "sm_90a"}),
    "Hopper, backward, causal, ordered": (
        AttentionSpec(128, mask=causal(), deterministic=True),
        (300, 330),
        {"arch": "sm_90a"},
    ),
    # Heads share keys, and there is a second sequence.
    "Hopper, backward, dropout": (
        AttentionSpec(128, mask=causal(), dropout=True),
        (150, 200),
        {"arch": "sm_90a", "heads": 4, "batch": 2},
    ),
    "Hopper, backward, dropout, ordered": (
        AttentionSpec(128, dropout=True, deterministic=True),
        (100, 150),
        {"arch": "sm_90a"},
    ),
    # A tile has 128 queries.
    "Hopper, backward, dropout, many queries": (AttentionSpec(64, dropout=True), (150, 100), {"arch": "sm_90a"}),
    "Hopper, backward, dropout, infinite value": (
        AttentionSpec(128, mask=causal(), dropout=True),
        (100, 200),
        {"arch": "sm_90a", "infinite_value_from_end": 1},
    ),
    "Hopper, wide heads, dropout": (
        AttentionSpec(256, mask=causal(), dropout=True),
        (150, 200),
        {"arch": "sm_90a", "heads": 4, "batch": 2},
    ),
    "Hopper, backward, packed": (
        AttentionSpec(128, mask=causal(), varlen=True),
        (300, 330),
        {"arch": "sm_90a", "packing": PACKING_LONG, "batch": 5},
    ),
    "Hopper, backward, packed, unused keys": (
        AttentionSpec(128, varlen=True),
        (70, 300),
        {"arch": "sm_90a", "packing": PACKING_UNUSED, "batch": 3},
    ),
    "Hopper, backward, packed, unused keys, ordered": (
        AttentionSpec(128, varlen=True, deterministic=True),
        (70, 300),
        {"arch": "sm_90a", "packing": PACKING_UNUSED, "batch": 3},
    ),
    "Hopper, backward, many packed sequences, infinite key": (
        AttentionSpec(64, mask=causal(), varlen=True),
        (40, 40),
        {
            "arch": "sm_90a",
            "packing": PACKING_MANY,
            "batch": 40,
            "heads": 2,
            "heads_kv": 1,
            "infinite_key_from_end": 1,
        },
    ),
    # Without a mask nothing is repaired.
    "Hopper, wide heads, packed, every pair": (
        AttentionSpec(256, varlen=True),
        (70, 300),
        {"arch": "sm_90a", "packing": PACKING_UNUSED, "batch": 3},
    ),
    "Hopper, wide heads, packed": (
        AttentionSpec(256, mask=causal(), varlen=True),
        (300, 330),
        {"arch": "sm_90a", "packing": PACKING_LONG, "batch": 5},
    ),
    # Two tiles of keys for each head, with one tile of queries, so that nothing but the rings holds the producer back.
    "Hopper, backward, short": (AttentionSpec(128), (60, 600), {"arch": "sm_90a"}),
    # Sums for one head at a time, for which five heads wait.
    "Hopper, backward, few sums": (
        AttentionSpec(64),
        (140, 140),
        {"arch": "sm_90a", "heads": 5, "heads_kv": 5, "sum_blocks": 0},
    ),
    # A block has a tile of queries, or tiles of keys, of more steps than there are slots.
    "Hopper, wide heads": (
        AttentionSpec(256, mask=causal()),
        (200, 200),
        {"arch": "sm_90a", "heads": 1, "heads_kv": 1},
    ),
    # Rows of results end before those of tiles.
    "Hopper, padded heads": (
        AttentionSpec(40, head_dim_v=24, mask=causal()),
        (70, 70),
        {"arch": "sm_90a", "heads": 2, "heads_kv": 2},
    ),
    "Hopper, wide heads, padded": (
        AttentionSpec(136, head_dim_v=40, mask=causal()),
        (70, 70),
        {"arch": "sm_90a", "heads": 2, "heads_kv": 2},
    ),
    # Where Q has no more slots than P, the first consumer cannot be far enough ahead to replace P.
    "Hopper, wide heads, three slots": (
        AttentionSpec(192, head_dim_v=128),
        (300, 60),
        {"arch": "sm_90a", "heads": 1, "heads_kv": 1},
    ),
    "Hopper, wide heads, infinite key": (
        AttentionSpec(256, mask=causal()),
        (100, 100),
        {"arch": "sm_90a", "heads": 2, "heads_kv": 2, "infinite_key_from_end": 1},
    ),
    "Hopper, wide heads, infinite query": (
        AttentionSpec(256, mask=causal()),
        (100, 100),
        {"arch": "sm_90a", "heads": 1, "heads_kv": 1, "infinite_query_from_end": 90},
    ),
    "Hopper, backward, block-sparse": (
        AttentionSpec(128, mask=Mask.of(lambda b, h, q, k: q // 150 == k // 150)),
        (300, 300),
        {"arch": "sm_90a"},
    ),
    "Hopper, backward, non-finite values": (
        AttentionSpec(128, mask=causal()),
        (100, 200),
        {"arch": "sm_90a", "infinite_value_from_end": 1},
    ),
    # Keys of the same tile come before the query, which attends to them, and behind it.
    "Hopper, backward, bad query": (
        AttentionSpec(128, mask=causal()),
        (200, 200),
        {"arch": "sm_90a", "infinite_query_from_end": 90},
    ),
    # Keys that do not exist have the largest scores, and queries that do not exist have none that are numbers.
    "Hopper, backward, score": (
        AttentionSpec(128, score=Score.of(lambda s, b, h, q, k: s * 1.5 + k * 3.0 + log(300.5 - q))),
        (300, 300),
        {"arch": "sm_90a"},
    ),
}
