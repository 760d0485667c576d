"""Specs and schedules as TOML and JSON.

A file holds the fields of ``AttentionSpec`` at the top and, where a schedule is wanted, a table
``[schedule]``, with ``[schedule.warps]`` and ``[schedule.backward]`` inside. A mask is ``"full"``,
``"causal"``, a table such as ``{left = 512, right = 0, align = "top-left"}`` whose missing sides are open,
a condition ``{where = "ids[b, q] == ids[b, k]"}``, or a list of these, all of which must hold. ``score`` and
``sink`` are texts such as ``"tanh(s / cap) * cap"`` and ``"logits[h]"``. What these texts take from outside of
themselves is in ``captured``, such as ``{cap = 30.0, ids = "int32[2]", logits = "float32[1]"}``. Writing is
canonical: equal specs give equal text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashgen.common.show import show, show_path
from flashgen.errors import SpecError
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.masks.band import Band
from flashgen.spec.masks.mask import Mask, causal
from flashgen.spec.schedule import Schedule, WarpPartition
from flashgen.spec.text.parsing import parse_json, parse_toml, read_text
from flashgen.spec.text.reading import listed, schedule_from_dict, spec_from_dict

SUFFIXES = (".toml", ".json")


def spec_to_dict(spec: AttentionSpec) -> dict[str, Any]:
    """Every field by name, in one fixed order, as plain values; what few specs have, only where they have it."""
    return {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "dtype": spec.dtype,
        "mask": _mask_to_plain(spec.mask),
        **_score_to_plain(spec),
        "direction": spec.direction,
        "deterministic": spec.deterministic,
        **{name: True for name in ("dropout", "varlen") if getattr(spec, name)},
        **{name: value for name in ("cache", "cache_dtype") if (value := getattr(spec, name))},
        **{name: True for name in ("page_scales", "qv") if getattr(spec, name)},
        **{name: value for name in ("out_dtype", "scale_block") if (value := getattr(spec, name)) is not None},
    }


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """The fields that are not left to the plan, as plain values."""
    backward = {name: getattr(schedule.backward, name) for name in ("tile_q", "tile_kv", "stages", "warps")}
    fields = {name: getattr(schedule, name) for name in ("tile_q", "tile_kv", "stages", "algorithm", "softmax")}
    registers = None if schedule.registers is None else list(schedule.registers)
    warps = schedule.warps and _warps_to_plain(schedule.warps)
    return _given(fields | {"registers": registers, "warps": warps, "backward": _given(backward) or None})


def spec_to_json(spec: AttentionSpec) -> str:
    """One line of JSON."""
    return _json(spec_to_dict(spec))


def spec_from_json(text: str | bytes) -> AttentionSpec:
    """The spec of ``spec_to_json``'s text, or of any JSON object with a spec's fields."""
    return spec_from_dict(parse_json(text))


def spec_to_toml(spec: AttentionSpec, schedule: Schedule | None = None) -> str:
    """A TOML document, with the schedule's tables when it says anything."""
    tables = [_toml_fields(spec_to_dict(spec))]
    fields = schedule_to_dict(schedule or Schedule())
    warps, backward = fields.pop("warps", None), fields.pop("backward", None)
    for name, table in (("schedule", fields), ("schedule.warps", warps), ("schedule.backward", backward)):
        if table:
            tables.append(f"[{name}]\n{_toml_fields(table)}")
    return "\n".join(tables)


def spec_from_toml(text: str) -> AttentionSpec:
    """The spec of a TOML document without a schedule."""
    return spec_from_dict(parse_toml(text))


def load_spec(path: str | Path) -> tuple[AttentionSpec, Schedule]:
    """Read a ``.toml`` or ``.json`` file; one ``SpecError`` lists everything that is wrong with it."""
    path = Path(path)
    suffix = _checked_suffix(path)
    text = read_text(path)
    problems: list[str] = []
    try:
        values = parse_toml(text) if suffix == ".toml" else parse_json(text)
        schedule_values = values.pop("schedule", {})
        try:
            spec = spec_from_dict(values)
        except SpecError as error:
            problems += error.violations
        try:
            schedule = schedule_from_dict(schedule_values)
        except SpecError as error:
            problems += error.violations
    except SpecError as error:
        problems += error.violations
    if problems:
        raise SpecError(*(f"{path}: {problem}" for problem in listed(problems)))
    return spec, schedule


def dump_spec(spec: AttentionSpec, schedule: Schedule | None, path: str | Path) -> None:
    """Write a file that ``load_spec`` reads back as the same spec and schedule."""
    path = Path(path)
    if _checked_suffix(path) == ".toml":
        text = spec_to_toml(spec, schedule)
    else:
        fields = schedule_to_dict(schedule or Schedule())
        text = _json(spec_to_dict(spec) | ({"schedule": fields} if fields else {})) + "\n"
    path.write_bytes(text.encode("utf-8"))


def _checked_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(
            f"{show_path(path)} has the suffix {show(suffix)}; a spec file's name ends in {' or '.join(SUFFIXES)}"
        )
    return suffix


def _warps_to_plain(warps: WarpPartition) -> dict[str, Any]:
    """The fields that the kind of partition has."""
    names = ("producers", "consumers") if warps.kind == "specialized" else ("count",)
    return {name: getattr(warps, name) for name in ("kind", *names)}


def _mask_to_plain(mask: Mask) -> Any:
    bands = [
        "causal" if part == causal() else _band_to_plain(band, align)
        for part, band, align in (
            (Mask(bottom_right=mask.bottom_right), mask.bottom_right, None),
            (Mask(top_left=mask.top_left), mask.top_left, "top-left"),
        )
        if not band.is_full
    ]
    if mask.rest is not None:
        from flashgen.expr import text

        bands.append({"where": text(mask.rest.root)})
    return "full" if not bands else bands[0] if len(bands) == 1 else bands


def _score_to_plain(spec: AttentionSpec) -> dict[str, Any]:
    """The fields ``score``, ``sink`` and ``captured``, each where there is something to say."""
    if spec.mask.rest is None and spec.score is None:
        return {}
    from flashgen.expr import text
    from flashgen.spec.text.expressions import value_to_plain

    # The widths of bands beside the expression are no captured values here, and take no names from others.
    rest = Mask(rest=spec.mask.rest)
    score = spec.score and spec.score.apart_from(rest)
    sink = score and score.sink
    fields = {
        "score": text(score.traced.root) if score and (score.changes_logits or sink is None) else None,
        "sink": text(sink.root) if sink else None,
    }
    parts = [part for part in (rest.rest, score and score.traced, sink) if part]
    values = {name: value for part in parts for name, value in {**part.scalars, **part.tensors}.items()}
    captured = {name: value_to_plain(value) for name, value in sorted(values.items())}
    return _given(fields | {"captured": captured or None})


def _band_to_plain(band: Band, align: str | None) -> dict[str, Any]:
    return _given({"left": band.left, "right": band.right, "align": align})


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _json(values: Any) -> str:
    import msgspec

    return msgspec.json.encode(values).decode()


def _toml_fields(fields: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in fields.items())


def _toml_value(value: Any) -> str:
    """Numbers, booleans and the texts a spec holds, which are plain ASCII, look the same in TOML and JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return _json(value)
