"""The command line that rebuilds a spec: what a generated source names in its header."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.mask import Band, Mask
from flashgen.spec.schedule import Schedule


def rebuild_command(spec: AttentionSpec, schedule: Schedule | None = None, arch: str | None = None) -> str:
    """``flashgen build ...`` with the options that give this spec, schedule and architecture again.

    Every word is a fixed option, a number or a name from a table, so the line needs no shell quoting.
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
    if not spec.needs_backward:
        yield "--forward-only"
    if spec.deterministic:
        yield "--deterministic"


def _mask_options(mask: Mask) -> Iterator[str]:
    if mask.bottom_right == Band(right=0):
        yield "--causal"
    elif not mask.bottom_right.is_full:
        yield f"--window {_sides(mask.bottom_right)}"
    if not mask.top_left.is_full:
        yield f"--window {_sides(mask.top_left)},top-left"


def _sides(band: Band) -> str:
    return ",".join("-1" if side is None else str(side) for side in (band.left, band.right))


def _schedule_options(schedule: Schedule) -> Iterator[str]:
    forward = {"tile-q": schedule.tile_q, "tile-kv": schedule.tile_kv, "stages": schedule.stages}
    yield from _numbers("--", forward)
    if schedule.warps is not None:
        yield f"--warps {schedule.warps.count}"
        yield f"--warp-partition {schedule.warps.kind.replace('_', '-')}"
    back = schedule.backward
    backward = {"tile-q": back.tile_q, "tile-kv": back.tile_kv, "stages": back.stages, "warps": back.warps}
    yield from _numbers("--backward-", backward)


def _numbers(prefix: str, options: dict[str, int | None]) -> Iterator[str]:
    for name, value in options.items():
        if value is not None:
            yield f"{prefix}{name} {value}"
