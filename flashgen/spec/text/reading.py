"""Plain values, as TOML and JSON give them, into specs and schedules; every violation is listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.common.show import show
from flashgen.errors import SpecError
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.masks.mask import Mask, causal, full, window
from flashgen.spec.schedule import BackwardSchedule, Schedule, WarpPartition

if TYPE_CHECKING:
    from flashgen.spec.text.expressions import Reader, Value

TEXT_FIELDS = ("mask", "score", "sink", "captured")
OPTION_FIELDS = (
    *("direction", "deterministic", "dropout", "varlen", "cache", "cache_dtype", "page_scales", "qv"),
    *("out_dtype", "scale_block"),
)
SPEC_FIELDS = ("head_dim", "head_dim_v", "dtype", *TEXT_FIELDS, *OPTION_FIELDS)
SCHEDULE_FIELDS = ("tile_q", "tile_kv", "stages", "algorithm", "softmax", "registers", "warps", "backward")
WARP_FIELDS = ("kind", "count", "producers", "consumers")
BACKWARD_FIELDS = ("tile_q", "tile_kv", "stages", "warps")
MASK_FIELDS = ("left", "right", "align")
CONDITION_FIELDS = ("where",)
MASK_REMEDY = 'use "full", "causal", a table {left = 512, right = 0} or {where = "q >= k"}, or a list of these'
CAPTURED_REMEDY = 'write captured = {cap = 30.0, ids = "int32[2]"}'
WARPS_REMEDY = 'write {kind = "split_q", count = 4} or {kind = "specialized", consumers = 2}'
_INT64 = range(-(2**63), 2**63)
#: Errors that one message lists.
MOST_PROBLEMS = 20
MORE_PROBLEMS = "there are more errors; correct these first"
#: Parts of a mask that is a list: they are put together one after the other.
MOST_MASKS = 64
T = TypeVar("T")


def spec_from_dict(values: Mapping[str, Any]) -> AttentionSpec:
    """A spec from its fields by name; fields left out take their defaults."""
    problems: list[str] = []
    fields = _known_fields(values, SPEC_FIELDS, "", problems)
    if "head_dim" not in values:
        problems.append("head_dim is missing; add it, a whole number from 1 to 256")
    fields.setdefault("head_dim", 1)  # so that the other fields are judged too
    texts = {name: fields.pop(name) for name in TEXT_FIELDS if name in fields}
    fields |= _collect(problems, "", lambda: mask_and_score(texts)) or {}
    spec = _collect(problems, "", lambda: AttentionSpec(**fields))
    return _result(spec, problems)


def mask_and_score(texts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields mask and score of a spec from ``TEXT_FIELDS``, as plain values; what is missing is left out."""
    problems: list[str] = []
    captured = _collect(problems, "", lambda: captured_from_plain(texts.get("captured", {})))
    fields: dict[str, Any] = {}
    if captured is None:  # every text that uses it would complain again
        return _result(None, problems)
    reader = _reader(captured, texts)
    if "mask" in texts:
        fields["mask"] = _collect(problems, "", lambda: mask_from_plain(texts["mask"], reader)) or full()
    if reader is not None:
        score = _collect(problems, "", lambda: reader.score(texts.get("score"), texts.get("sink")))
        fields |= {} if score is None else {"score": score}
        if not problems:
            unused = islice(reader.unused(), MOST_PROBLEMS + 1)
            problems += [f"captured.{name} is used by neither mask, score nor sink; leave it out" for name in unused]
    return _result(fields, problems)


def captured_from_plain(values: Any) -> dict[str, Value]:
    """Captured values by name, from the table ``captured``."""
    problems: list[str] = []
    table = _table(values, "captured", CAPTURED_REMEDY)
    if not table:
        return {}
    from flashgen.spec.text.expressions import check_name, value_from_plain

    captured: dict[str, Value] = {}
    for key, value in table.items():
        if len(problems) > MOST_PROBLEMS:
            break
        name = _collect(problems, "", lambda key=key: check_name(str(key)))  # type: ignore[misc]
        read = _collect(problems, "", lambda key=key, value=value: value_from_plain(value, f"captured.{str(key)[:60]}"))  # type: ignore[misc]
        if name is not None and read is not None:
            captured[name] = read
    return _result(captured, problems)


def _reader(captured: Mapping[str, Value], texts: Mapping[str, Any]) -> Reader | None:
    """A reader of expressions, which brings NumPy with it; None where there are none."""
    parts = texts["mask"] if isinstance(texts.get("mask"), list) else [texts.get("mask")]
    conditions = any(isinstance(part, Mapping) and "where" in part for part in parts)
    if not (conditions or captured or "score" in texts or "sink" in texts):
        return None
    from flashgen.spec.text.expressions import Reader

    return Reader(captured)


def schedule_from_dict(values: Any) -> Schedule:
    """A schedule from its fields by name; what is left out is the plan's choice."""
    problems: list[str] = []
    table = _table(values, "schedule", f"write [schedule] with {', '.join(SCHEDULE_FIELDS)}")
    fields = _known_fields(table, SCHEDULE_FIELDS, "schedule.", problems)
    if isinstance(fields.get("registers"), list):
        fields["registers"] = tuple(fields["registers"])
    if "warps" in fields:
        warps = fields.pop("warps")
        fields["warps"] = _collect(problems, "", lambda: _warps_from_plain(warps))
    if "backward" in fields:
        backward = fields.pop("backward")
        fields["backward"] = _collect(problems, "", lambda: _backward_from_plain(backward)) or BackwardSchedule()
    schedule = _collect(problems, "schedule ", lambda: Schedule(**fields))
    return _result(schedule, problems)


def mask_from_plain(value: Any, reader: Reader | None = None) -> Mask:
    """A mask from a word, a table, or a list of these that must all hold; ``reader`` reads conditions."""
    if not isinstance(value, list):
        return _part_of_mask(value, "mask", reader)
    if len(value) > MOST_MASKS:
        raise SpecError(f"mask has {len(value)} parts; use at most {MOST_MASKS}, or write one condition of them")
    problems: list[str] = []
    combined = full()
    for i, part in enumerate(value):
        try:
            combined = combined & _part_of_mask(part, f"mask[{i}]", reader)
        except SpecError as error:
            problems += error.violations
    return _result(combined, problems)


def _part_of_mask(value: Any, name: str, reader: Reader | None) -> Mask:
    if value == "full":
        return full()
    if value == "causal":
        return causal()
    problems: list[str] = []
    table = _table(value, name, MASK_REMEDY, "a mask")
    if "where" in table and reader is not None:
        fields = _known_fields(table, CONDITION_FIELDS, f"{name}.", problems)
        text = fields.get("where")
        mask = None if text is None else _collect(problems, "", lambda: reader.mask(text, f"{name}.where"))
        return _result(mask, problems)
    fields = _known_fields(table, MASK_FIELDS, f"{name}.", problems)
    return _result(_collect(problems, f"{name}: ", lambda: window(**fields)), problems)


def _warps_from_plain(value: Any) -> WarpPartition:
    problems: list[str] = []
    fields: dict[str, Any]
    table = _table(value, "schedule.warps", WARPS_REMEDY)
    fields = _known_fields(table, WARP_FIELDS, "schedule.warps.", problems)
    if "kind" not in table:
        problems.append(f"schedule.warps.kind is missing; {WARPS_REMEDY}")
    # Where the kind is missing, the other fields are judged beside a right one.
    fields = {"kind": "split_q"} | fields
    return _result(_collect(problems, "schedule.warps: ", lambda: WarpPartition(**fields)), problems)


def _backward_from_plain(value: Any) -> BackwardSchedule:
    problems: list[str] = []
    table = _table(value, "schedule.backward", f"write [schedule.backward] with {', '.join(BACKWARD_FIELDS)}")
    fields = _known_fields(table, BACKWARD_FIELDS, "schedule.backward.", problems)
    return _result(_collect(problems, "schedule ", lambda: BackwardSchedule(**fields)), problems)


def _table(value: Any, name: str, remedy: str, noun: str = "a table") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{name}={show(value)} is not {noun}; {remedy}")
    return value


def _known_fields(values: Mapping[str, Any], known: Sequence[str], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The fields that can be handed on; ``problems`` gains a sentence for each that cannot."""
    fields = {}
    for name, value in values.items():
        if name not in known:
            # Each remedy looks for the nearest name, which takes time.
            if len(problems) <= MOST_PROBLEMS:
                problems.append(f"{prefix}{_shown_name(name)}={show(value)} is not a field; {_remedy(name, known)}")
        elif value is None:
            problems.append(f"{prefix}{name}=null is not a value; leave the field out for its default")
        elif isinstance(value, int) and value not in _INT64:
            problems.append(f"{prefix}{name}={show(value)} is too large; integers have 64 bits here")
        else:
            fields[name] = value
    return fields


def _shown_name(name: object) -> str:
    text = str(name)[:60]
    return text if text.isprintable() else show(text)


def _remedy(name: str, known: Sequence[str]) -> str:
    import difflib

    if name == "schedule":
        return "a schedule is read by load_spec, at the top of a file"
    close = difflib.get_close_matches(str(name)[:60], known, 1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"


def _collect(problems: list[str], prefix: str, make: Callable[[], T]) -> T | None:
    """What ``make`` gives; or None, and ``problems`` gains its violations."""
    try:
        return make()
    except SpecError as error:
        problems += [prefix + violation for violation in error.violations]
        return None


def _result(value: T | None, problems: list[str]) -> T:
    if problems or value is None:
        raise SpecError(*listed(problems))
    return value


def listed(problems: Sequence[str]) -> list[str]:
    """As many of these as one message lists, and a sentence that there are more where there are."""
    return [*problems[:MOST_PROBLEMS], *([MORE_PROBLEMS] if len(problems) > MOST_PROBLEMS else [])]
