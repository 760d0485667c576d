"""A trial as one line of text, and back: ``Sq=37 Sk=53 H=6/2 fill=huge k=wide-rows seed=7 schedule=random:5 race``.

What is left out is 1 for the batch, one head, plain values and layouts, the spec's scale, and threads in sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from flashgen.common.show import shortened, show
from flashgen.errors import SpecError
from flashgen.verify.cases.case import PLAIN, Case
from flashgen.verify.cases.layouts import LAYOUTS
from flashgen.verify.cases.values import FILLS, NON_FINITE_VALUES
from flashgen.verify.trial import ORDERS, SIDES, Mode, Trial

T = TypeVar("T")

_ARRAYS = ("q", "k", "v", "do")
#: Words without a value.
_FLAGS = ("dlse", "race")
_EXAMPLE = "write words such as 'Sq=37 Sk=53 H=4/2 schedule=random:7 race'"
#: Far more than can be emulated; it keeps a slip of the finger from filling the memory.
_LARGEST = 2**16
_LARGEST_SEED = 2**64 - 1


def trial_text(trial: Trial) -> str:
    """The words that ``parse_trial`` reads."""
    return " ".join(_words(trial))


def parse_trial(text: str) -> Trial:
    """The trial that the words describe; SpecError lists everything that is wrong with them."""
    reader = _Reader(text)
    heads = reader.take("H", _heads, (1, 1))
    order = reader.take("schedule", _schedule, ("sequential", 0))
    case = Case(
        "drawn",
        reader.take("Sq", _whole, None),
        reader.take("Sk", _whole, None),
        batch=reader.take("B", _whole, 1),
        heads=heads[0],
        heads_kv=heads[1],
        fill=reader.take("fill", _one_of(FILLS), "normal"),
        scale=reader.take("scale", _scale, None),
        layouts=tuple(reader.take(name, _one_of(LAYOUTS), "contiguous") for name in _ARRAYS),
        non_finite=reader.take("non-finite", _one_of(NON_FINITE_VALUES), "nothing"),
        seed=reader.take("seed", _seed, 0),
        p=reader.take("p", _probability, 0.25),
        dlse=reader.take_flag("dlse"),
    )
    race = reader.take_flag("race")
    mode = Mode(order[0], order[1], race, reader.take("guard", _one_of(SIDES), "end"))
    reader.check()
    return Trial(case, mode)


def _words(trial: Trial) -> Iterator[str]:
    case, mode = trial.case, trial.mode
    yield f"Sq={case.len_q}"
    yield f"Sk={case.len_kv}"
    if case.batch != 1:
        yield f"B={case.batch}"
    if (case.heads, case.heads_kv) != (1, 1):
        yield f"H={case.heads}/{case.heads_kv}"
    if case.fill != "normal":
        yield f"fill={case.fill}"
    if case.scale is not None:
        yield f"scale={case.scale!r}"
    for name, layout, plain in zip(_ARRAYS, case.layouts, PLAIN, strict=True):
        if layout != plain:
            yield f"{name}={layout}"
    if case.non_finite != "nothing":
        yield f"non-finite={case.non_finite}"
    if case.seed:
        yield f"seed={case.seed}"
    if case.p != 0.25:
        yield f"p={case.p!r}"
    if case.dlse:
        yield "dlse"
    if (mode.schedule, mode.seed) != ("sequential", 0):
        yield f"schedule={mode.schedule}" + (f":{mode.seed}" if mode.seed else "")
    if mode.guard != "end":
        yield f"guard={mode.guard}"
    if mode.race:
        yield "race"


class _Reader:
    """The words of a text. Each option takes its word; a word that remains is an error."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, str] = {}
        self._wrong: list[str] = []
        for word in text.split():
            name, equals, value = word.partition("=")
            if name in self._values:
                self._wrong.append(f"the case names {show(name)} twice; {_EXAMPLE}")
            elif (name in _FLAGS) == bool(equals):
                self._wrong.append(f"the case has the word {show(word)}; {_EXAMPLE}")
            else:
                self._values[name] = value
        for name in ("Sq", "Sk"):
            if name not in self._values:
                self._wrong.append(f"the case names no {name}; {_EXAMPLE}")

    def take(self, name: str, read: Callable[[str], T], default: Any) -> Any:
        """The value of a word; the default when there is none, or none that can be read."""
        value = self._values.pop(name, None)
        if value is None:
            return default
        try:
            return read(value)
        except ValueError as error:
            self._wrong.append(f"the case has {name}={shortened(value)}, which is not {error}")
            return default

    def take_flag(self, name: str) -> bool:
        """Whether a word without a value is there."""
        return self._values.pop(name, None) is not None

    def check(self) -> None:
        """Raises SpecError if anything was wrong."""
        values = ("Sq", "Sk", "B", "H", "fill", "scale", *_ARRAYS, "non-finite", "seed", "p", "schedule", "guard")
        known = f"{', '.join(values)}, {' and '.join(_FLAGS)}"
        self._wrong += [f"the case has the unknown word {show(name)}; it knows {known}" for name in self._values]
        if self._wrong:
            raise SpecError(*self._wrong)


def _number(text: str, most: int) -> int:
    # int() would also take signs, spaces, underscores and other alphabets.
    if not re.fullmatch("[0-9]{1,20}", text) or int(text) > most:
        raise ValueError(f"a whole number from 0 to {most}")
    return int(text)


def _whole(text: str) -> int:
    return _number(text, _LARGEST)


def _seed(text: str) -> int:
    return _number(text, _LARGEST_SEED)


def _heads(text: str) -> tuple[int, int]:
    try:
        heads, heads_kv = (_whole(part) for part in text.split("/"))
    except ValueError:
        raise ValueError("HEADS/KV_HEADS, such as 4/2") from None
    if heads % heads_kv if heads_kv else heads:
        raise ValueError("a number of heads and a divisor of it, such as 4/2")
    return heads, heads_kv


def _schedule(text: str) -> tuple[str, int]:
    order, colon, seed = text.partition(":")
    try:
        return _one_of(ORDERS)(order), _seed(seed) if colon else 0
    except ValueError:
        raise ValueError(f"one of {', '.join(ORDERS)}, with a seed behind a colon, such as random:7") from None


def _scale(text: str) -> float:
    value = float(text) if re.fullmatch(r"[0-9.]+(e[+-]?[0-9]+)?", text) else 0.0
    if not 0.0 < value < math.inf:
        raise ValueError("a number above 0")
    return value


def _probability(text: str) -> float:
    value = float(text) if re.fullmatch(r"[0-9.]+(e-[0-9]+)?", text) else 1.0
    if not 0.0 <= value < 1.0:
        raise ValueError("a probability from 0 to below 1")
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return read
