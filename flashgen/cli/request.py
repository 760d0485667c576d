"""From option values to a spec, a schedule and architectures; everything wrong is said at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, TypeVar, cast

from flashgen.arch import Arch, get_arch
from flashgen.common.show import shortened, show
from flashgen.errors import PlanError, SpecError
from flashgen.spec import AttentionSpec, BackwardSchedule, Mask, Schedule, WarpPartition, causal, full, window
from flashgen.spec.masks.mask import Align
from flashgen.spec.schedule import PartitionKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for; no schedule and no architectures mean: choose."""

    spec: AttentionSpec
    schedule: Schedule | None = None
    archs: tuple[Arch, ...] = ()
    #: Whether it is about calls with few new tokens and a cache.
    decode: bool = False


#: New tokens, and keys, where a command about decode names none.
DECODE_TOKENS, DECODE_KEYS = 1, 4096


def decode_lengths(request: Request, len_q: int | None, len_kv: int | None, default: int = 1024) -> tuple[int, int]:
    """Queries and keys: those given, else usual ones."""
    if request.decode:
        return DECODE_TOKENS if len_q is None else len_q, DECODE_KEYS if len_kv is None else len_kv
    queries = len_q if len_q is not None else len_kv if len_kv is not None else default
    return queries, queries if len_kv is None else len_kv


@dataclass(slots=True)
class Violations:
    """Everything found wrong so far."""

    found: list[str] = field(default_factory=list)

    def attempt(self, make: Callable[[], T]) -> T | None:
        """What ``make`` returns, or None with its complaints noted."""
        try:
            return make()
        except SpecError as error:
            self.found += error.violations
        except PlanError as error:
            self.found.append(str(error))
        return None

    def check(self) -> None:
        """Raise if anything was found."""
        if self.found:
            raise SpecError(*dict.fromkeys(self.found))


def make_request(
    spec_options: dict[str, Any],
    spec_file: Path | None,
    forward: dict[str, Any],
    backward: dict[str, Any],
    arch_names: Iterable[str],
    *,
    decode: bool = False,
) -> Request:
    """A request from options by their Python names, unset ones None, False or empty."""
    violations = Violations()
    from_file = Schedule()
    spec: AttentionSpec | None = None
    if spec_file is None:
        if decode:
            spec_options = {**spec_options, "cache": spec_options["cache"] or "paged", "forward_only": True}
        spec = _spec_from_options(violations, **spec_options)
    else:
        loaded = violations.attempt(lambda: _spec_from_file(spec_file, spec_options))
        if loaded is not None:
            spec, from_file = loaded
            if decode and not spec.cache:
                violations.found.append(f"--decode needs a cache; write cache = 'paged' into {spec_file}")
    schedule = _schedule(violations, from_file, forward, backward)
    archs = [violations.attempt(lambda name=name: get_arch(name)) for name in arch_names]  # type: ignore[misc]
    violations.check()
    assert spec is not None
    return Request(spec, schedule, tuple(dict.fromkeys(a for a in archs if a is not None)), decode)


def _spec_from_file(path: Path, spec_options: dict[str, Any]) -> tuple[AttentionSpec, Schedule]:
    from flashgen.spec.text.files import load_spec

    given = ["--" + name.replace("_", "-") for name, value in spec_options.items() if value]
    if given:
        raise SpecError(f"{', '.join(given)} cannot go with --spec; put them into {path}, or leave --spec out")
    return load_spec(path)


def _spec_from_options(
    violations: Violations,
    *,
    head_dim: int | None,
    head_dim_v: int | None,
    dtype: str | None,
    causal: bool,
    window: list[str],
    mask: str | None,
    score: str | None,
    sink: str | None,
    captured: list[str],
    forward_only: bool,
    deterministic: bool,
    dropout: bool,
    varlen: bool,
    cache: str | None,
    cache_dtype: str | None,
    page_scales: bool,
    qv: bool,
    out_dtype: str | None,
    scale_block: int | None,
) -> AttentionSpec | None:
    if head_dim is None:
        violations.found.append("--head-dim is missing; give --head-dim N (1 to 256) or --spec FILE.toml")
    if head_dim_v == 0:  # AttentionSpec reads 0 as "same as head_dim"; a person who typed it did not mean that
        violations.found.append("head_dim_v=0 is out of range; use a whole number from 1 to 256")
    bands = _bands(violations, causal, window)
    expressions = violations.attempt(lambda: _expressions(mask, score, sink, captured)) or {}
    return violations.attempt(
        lambda: AttentionSpec(
            1 if head_dim is None else head_dim,
            head_dim_v=head_dim_v or 0,
            dtype=dtype or "bf16",
            mask=bands & expressions.get("mask", full()),
            score=expressions.get("score"),
            direction="forward" if forward_only else "both",
            deterministic=deterministic,
            dropout=dropout,
            varlen=varlen,
            cache=cache,  # type: ignore[arg-type]
            cache_dtype=cache_dtype,
            page_scales=page_scales,
            qv=qv,
            out_dtype=out_dtype,
            scale_block=scale_block,
        )
    )


def _bands(violations: Violations, is_causal: bool, windows: list[str]) -> Mask:
    parts = [causal()] if is_causal else []
    for text in windows:
        part = violations.attempt(lambda text=text: parse_window(text))  # type: ignore[misc]
        parts += [part] if part is not None else []
    return reduce(and_, parts, full())


def _expressions(mask: str | None, score: str | None, sink: str | None, captured: list[str]) -> dict[str, Any]:
    """The fields mask and score that the texts say, where they say any."""
    texts = {"mask": mask and {"where": mask}, "score": score, "sink": sink}
    given = {name: text for name, text in texts.items() if text is not None}
    if not (given or captured):
        return {}
    from flashgen.spec.text.reading import mask_and_score

    return mask_and_score(given | {"captured": _captured(captured)})


def _captured(words: list[str]) -> dict[str, Any]:
    """Values by name, from words ``NAME=VALUE``."""
    from flashgen.spec.text.expressions import plain_from_text

    values: dict[str, Any] = {}
    violations = Violations()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            violations.found.append(
                f"--captured {show(word)} is not NAME=VALUE; write one such as cap=30.0 or ids=int32[2]"
            )
        elif name in values:
            violations.found.append(f"--captured {shortened(name)} is given twice; leave one out")
        else:
            values[name] = plain_from_text(text)
    violations.check()
    return values


def parse_window(text: str) -> Mask:
    """A mask from ``LEFT,RIGHT`` or ``LEFT,RIGHT,ALIGN``; -1 is no limit."""
    sides, align = text.split(","), "bottom-right"
    if len(sides) == 3:
        align = sides.pop().strip()
    try:
        left, right = (int(side) for side in sides)
    except ValueError:
        raise SpecError(
            f"--window {show(text)} is not LEFT,RIGHT; write two whole numbers such as 512,0 (-1 is no limit)"
        ) from None
    return window(left, right, align=cast(Align, align))


def _schedule(
    violations: Violations, base: Schedule, forward: dict[str, Any], backward: dict[str, Any]
) -> Schedule | None:
    """``base`` with every option that is given in place of what it says; None when nothing is said at all."""
    partition = violations.attempt(
        lambda: _partition(base.warps, forward["warps"], forward["warp_partition"], forward["consumers"])
    )
    registers = violations.attempt(lambda: _registers(forward["registers"]))
    plain = {name: forward[name] for name in ("tile_q", "tile_kv", "stages", "algorithm", "softmax")}
    fields = _over(base, plain | {"registers": registers})
    back = violations.attempt(lambda: BackwardSchedule(**_over(base.backward, backward)))
    schedule = violations.attempt(lambda: Schedule(**fields, warps=partition, backward=back or BackwardSchedule()))
    return None if schedule == Schedule() else schedule


def _over(base: object, options: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(base, name) if value is None else value for name, value in options.items()}


def _partition(
    base: WarpPartition | None, count: int | None, kind: str | None, consumers: int | None
) -> WarpPartition | None:
    if count is None and kind is None and consumers is None:
        return base
    if kind is None:
        kind = "specialized" if consumers is not None else base.kind if base else "split_q"
    kind = kind.replace("-", "_")
    same = base if base and base.kind == kind else None
    if kind == "specialized":
        if count is not None:
            raise SpecError(f"--warps {count} does not go with specialized warps; give --consumers N (1 to 3) instead")
        if same and consumers is None:
            consumers = same.consumers
    elif same and count is None:
        count = same.count
    return WarpPartition(cast(PartitionKind, kind), count, consumers=consumers)


def _registers(text: str | None) -> tuple[int, ...] | None:
    """Numbers from ``PRODUCERS,CONSUMERS``; whether they are right is the schedule's to say."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SpecError(
            f"--registers {show(text)} is not PRODUCERS,CONSUMERS; write two whole numbers such as 24,240"
        ) from None
