"""The command line that rebuilds a spec: what a generated source names in its header."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.masks.band import Band
from flashgen.spec.masks.mask import Mask
from flashgen.spec.schedule import Schedule, WarpPartition


def rebuild_command(spec: AttentionSpec, schedule: Schedule | None = None, arch: str | None = None) -> str:
    """``flashgen build ...`` with the options that give this spec, schedule and architecture again.

    What is not a fixed option, a number or a name from a table is quoted for a shell.
    """
    words = ["flashgen build", *_spec_options(spec)]
    if schedule is not None:
        words += _schedule_options(schedule)
    if arch is not None:
        words.append(f"--arch {arch}")
    return " ".join(words)


def _spec_options(spec: AttentionSpec) -> Iterator[str]:
    yield f"--head-dim {spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        yield f"--head-dim-v {spec.head_dim_v}"
    yield f"--dtype {spec.dtype}"
    yield from _mask_options(spec.mask)
    yield from _text_options(spec)
    if not spec.needs_backward:
        yield "--forward-only"
    if spec.deterministic:
        yield "--deterministic"
    if spec.dropout:
        yield "--dropout"
    if spec.varlen:
        yield "--varlen"
    if spec.cache:
        yield f"--cache {spec.cache}"
    if spec.cache_dtype:
        yield f"--cache-dtype {spec.cache_dtype}"
    if spec.page_scales:
        yield "--page-scales"
    if spec.qv:
        yield "--qv"
    if spec.out_dtype:
        yield f"--out-dtype {spec.out_dtype}"
    if spec.scale_block:
        yield f"--scale-block {spec.scale_block}"


def _mask_options(mask: Mask) -> Iterator[str]:
    if mask.bottom_right == Band(right=0):
        yield "--causal"
    elif not mask.bottom_right.is_full:
        yield f"--window {_sides(mask.bottom_right)}"
    if not mask.top_left.is_full:
        yield f"--window {_sides(mask.top_left)},top-left"


def _text_options(spec: AttentionSpec) -> Iterator[str]:
    """Expressions, and the values that they captured."""
    if spec.mask.rest is None and spec.score is None:
        return
    from flashgen.spec.text.expressions import plain_to_text
    from flashgen.spec.text.files import spec_to_dict

    fields = spec_to_dict(spec)
    parts = fields["mask"] if isinstance(fields["mask"], list) else [fields["mask"]]
    conditions = [("mask", part["where"]) for part in parts if isinstance(part, dict) and "where" in part]
    for name, text in (*conditions, *((name, fields[name]) for name in ("score", "sink") if name in fields)):
        yield f"--{name} {shlex.quote(text)}"
    for name, plain in fields.get("captured", {}).items():
        yield f"--captured {shlex.quote(f'{name}={plain_to_text(plain)}')}"


def _sides(band: Band) -> str:
    return ",".join("-1" if side is None else str(side) for side in (band.left, band.right))


def _schedule_options(schedule: Schedule) -> Iterator[str]:
    forward = {"tile-q": schedule.tile_q, "tile-kv": schedule.tile_kv, "stages": schedule.stages}
    yield from _numbers("--", forward)
    yield from _warp_options(schedule.warps)
    for name, word in (("algorithm", schedule.algorithm), ("softmax", schedule.softmax)):
        if word is not None:
            yield f"--{name} {word}"
    if schedule.registers is not None:
        yield f"--registers {','.join(map(str, schedule.registers))}"
    back = schedule.backward
    backward = {"tile-q": back.tile_q, "tile-kv": back.tile_kv, "stages": back.stages, "warps": back.warps}
    yield from _numbers("--backward-", backward)


def _warp_options(warps: WarpPartition | None) -> Iterator[str]:
    if warps is None:
        return
    if warps.kind == "specialized":
        yield f"--consumers {warps.consumers}"
    else:
        yield f"--warps {warps.count}"
    yield f"--warp-partition {warps.kind.replace('_', '-')}"


def _numbers(prefix: str, options: dict[str, int | None]) -> Iterator[str]:
    for name, value in options.items():
        if value is not None:
            yield f"{prefix}{name} {value}"
