"""Several calls as one: what they are run on is handed over once, and what only they need is allocated at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from flashgen.launch.arrays.array import Framework
from flashgen.launch.call.offsets import Offsets
from flashgen.launch.call.prepared import FORWARD_RESULTS, Call, Output, make_call
from flashgen.launch.target import Buffer, Step, Target

#: A call and what to run it on: arrays, their addresses, and numbers. (A named one takes longer to make.)
Found = tuple[Target, Call, Framework, tuple[Any, ...], Sequence[int], tuple[int, ...]]
#: A call, and all that it made, of which later ones may take its results.
Part = tuple[Found, Sequence[Any]]


def run(found: Found, like: Any, stream: Any = None) -> list[Any]:
    """The results of a call, and whatever else it allocates."""
    target, call, framework, _, pointers, numbers = found
    return call.run(target, framework, like, pointers, stream, numbers)


def taken(parts: Sequence[Part]) -> tuple[Any, ...]:
    """The arrays that calls take, all but those that calls before them made; each once."""
    made = _made(parts)
    arrays = {id(array): array for (_, _, _, arrays, _, _), _ in parts for array in arrays if id(array) not in made}
    return tuple(arrays.values())


def joined(parts: Sequence[Part], wanted: Collection[str]) -> Call:
    """The call that does one after another what these did, with the arrays that are ``taken``.

    Its results are the ``wanted`` outputs, in the order in which they are made; all others are workspaces.
    """
    (target, first, framework, given, _, _), _ = parts[0]
    alone = len(parts) == 1 and len(given) == len({id(x) for x in given})
    if alone and {output.name for output in first.outputs[:FORWARD_RESULTS]} == set(wanted):
        return first
    arrays, made, outputs = taken(parts), _made(parts), [output for found, _ in parts for output in found[1].outputs]
    results = [output for output in outputs if output.name in wanted]
    workspaces = [output for output in outputs if output.name not in wanted]
    keys = [*map(id, arrays), *(output.name for output in (*results, *workspaces))]
    steps: list[Step] = []
    checked: list[Offsets] = []
    for (_, call, _, own, _, numbers), _ in parts:
        assert not numbers, "what a call brings anew each time is no part of it"
        order = [keys.index(made[id(x)].name if id(x) in made else id(x)) for x in own]
        order += [keys.index(output.name) for output in call.outputs]
        steps += [step.moved(order) for step in call.steps]
        checked += [array.moved(order) for array in call.checked]
    around = _stretches(parts, arrays) if target.on_host else None
    return make_call(framework, first.device, tuple(steps), results, workspaces, around, checked)


def _made(parts: Sequence[Part]) -> dict[int, Output]:
    """The outputs of calls by the arrays that they were."""
    return {id(x): output for found, results in parts for x, output in zip(results, found[1].outputs, strict=False)}


def _stretches(parts: Sequence[Part], arrays: Sequence[Any]) -> list[Buffer]:
    """The memory around each array, writable where it is for one of the calls."""
    known: dict[int, Buffer] = {}
    for (_, call, _, own, _, _), _ in parts:
        for array, stretch in zip(own, call.stretches, strict=False):
            if id(array) not in known or stretch.writable:
                known[id(array)] = stretch
    return [known[id(array)] for array in arrays]
