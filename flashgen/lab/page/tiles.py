"""What the page shows of tiles: the facts at its top, the map, and the inputs and results of the estimator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from flashgen.common.html import markup
from flashgen.dtypes import DTYPES
from flashgen.explanation import Explanation
from flashgen.explanation.drawing import flop, percent
from flashgen.explanation.svg import Bins, tile_map
from flashgen.lab.estimator import Estimate
from flashgen.spec.text.command import rebuild_command
from flashgen.spec.text.files import spec_to_json

#: The page's sums are exact up to here: the numbers of JavaScript hold 53 bits.
_LONGEST = 2**20
_RESULTS = (
    ("processed", "tiles processed", "of all tiles"),
    ("naive_scores", "naive scores", "entries of QKᵀ"),
    ("tile_scores", "computed scores", "whole tiles, their edges included"),
    ("relative_work", "relative work", "computed / naive scores"),
    ("flops", "operations", "two products, forward"),
    ("workspace_saved", "workspace saved", "the score matrix, never stored"),
    ("tile_bytes", "tiles on chip", "one of each of Q, K and V"),
)


def map_section(e: Explanation) -> dict[str, Any]:
    """The facts and the map; ``data`` is for the script."""
    bins = Bins.of(e.kinds, (e.tile_q, e.tile_kv), (e.len_q, e.len_kv)) if e.tiles else None
    drawing = None
    if bins:
        drawing = tile_map(bins, titles=False)
        drawing.set("id", "tile-map")
    return {
        "data": asdict(bins) if bins else None,
        "tile_map": Markup(markup(drawing)) if drawing is not None else None,
        "scale": bins.scale() if bins else "",
        "where": f"Batch {e.batch}, head {e.head}: {e.len_q:,} queries by {e.len_kv:,} keys.",
        "found": "The loop bounds alone find the tiles."
        if e.closed
        else "Kernels also test each tile between the loop bounds.",
        "kinds": [
            {"name": name, "text": f"{text}: {count:,} ({percent(count, e.tiles)})"}
            for name, text, count in (
                ("full", "full, no pair is tested", e.full),
                ("partial", "partial, pairs are tested", e.partial),
                ("empty", "empty, skipped", e.empty),
            )
        ],
        "bounds": [
            {"name": name, "text": text}
            for name, text in (
                ("first key", e.key_begin),
                ("before key", e.key_end),
                ("first query", e.query_begin),
                ("before query", e.query_end),
            )
        ],
        "facts": list(_facts(e)),
        "spec": spec_to_json(e.spec) if e.forward_kernel else e.mask,
        "command": _command(e),
    }


def _facts(e: Explanation) -> Iterator[dict[str, str]]:
    processed = e.partial + e.full
    yield _fact("tiles processed", percent(processed, e.tiles), f"{processed:,} of {e.tiles:,}")
    yield _fact("work of one head", flop(e.flops), f"of {flop(e.dense_flops)} dense")
    saved = Estimate.of(e).workspace_saved
    yield _fact("score matrix not stored", binary(saved), f"per head, in {e.spec.dtype}")
    if kernel := e.forward_kernel:
        yield _fact("shared memory", binary(kernel.smem.bytes), f"of {binary(kernel.arch.max_smem_per_block)} a block")
        yield _fact("forward algorithm", e.algorithm.replace("FlashAttention", "FA"), f"{kernel.threads} threads")


def _fact(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _command(e: Explanation) -> str:
    kernel = e.forward_kernel
    return rebuild_command(e.spec, kernel.schedule, kernel.arch.name) if kernel else ""


def estimator_section(e: Explanation) -> dict[str, Any]:
    """The inputs as they are at first; ``data`` has what the script needs beside them."""
    spec, bands = e.spec, _bands(e)
    skipping = f"The mask is {e.mask}; tiles are skipped exactly as it rules out." if bands else (
        f"The mask is {e.mask}. It is no band, so the shares of empty and partial tiles stay those of the map above."
    )  # fmt: skip
    lengths = max(_LONGEST, e.len_q, e.len_kv)
    return {
        "data": {
            "bands": bands,
            "empty": e.empty,
            "partial": e.partial,
            "full": e.full,
            "itemsizes": {name: dtype.bytes for name, dtype in DTYPES.items()},
        },
        "skipping": skipping,
        "has_live_map": bands is not None,
        "fields": [
            {"label": label, "name": name, "value": value, "least": 1, "most": most}
            for label, name, value, most in (
                ("queries", "len_q", e.len_q, lengths),
                ("keys", "len_kv", e.len_kv, lengths),
                ("tile queries", "tile_q", e.tile_q, max(1024, e.tile_q)),
                ("tile keys", "tile_kv", e.tile_kv, max(1024, e.tile_kv)),
                ("head dimension", "head_dim", spec.head_dim, 256),
                ("value dimension", "head_dim_v", spec.head_dim_v, 256),
            )
        ],
        "dtypes": list(DTYPES),
        "dtype": spec.dtype,
        "results": [{"name": name, "label": label, "note": note} for name, label, note in _RESULTS],
    }


def _bands(e: Explanation) -> dict[str, dict[str, int | None]] | None:
    """The widths of the mask's bands; None where it is more than bands."""
    mask = e.spec.mask
    if mask.rest is not None:
        return None
    bands = {"bottom_right": mask.bottom_right, "top_left": mask.top_left}
    return {name: {"left": band.left, "right": band.right} for name, band in bands.items()}


def binary(count: int) -> str:
    """Bytes in the largest unit that they fill, such as ``226.5 KiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{count} bytes"
