"""Calls like one before: all that was found out then is right again, but for the addresses.

To see that a call is like one before takes most of the time of finding out. torch can compare tensors with others it
saw in one step: torch.compile does so before it runs what it compiled. What it compares is all that calls go by: types,
element types, devices, shapes, strides, whether gradients are wanted, and what looks at operators at the moment
(dispatch modes, function transforms, autocast).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from numbers import Number
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch

from flashgen.launch.arrays.array import MAX_ACCESS_BYTES, Framework
from flashgen.launch.call.batched_launch import Found, Part, joined, taken
from flashgen.launch.call.prepared import Call
from flashgen.launch.target import Target

#: What a call is remembered by: the arguments that may be tensors, of which the first two are, and all others.
CallKey = tuple[tuple[Any, ...], tuple[Any, ...]]
#: What the results of a call are called.
RESULTS = ("o", "lse")
_is_compiling = torch.compiler.is_compiling
_is_deterministic = torch.are_deterministic_algorithms_enabled
#: None in a torch that has it no more.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
#: How many combinations of options and shapes are remembered, and how many calls with the same ones.
_KEYS_KEPT, _CALLS_KEPT = 1024, 16
_LOW = MAX_ACCESS_BYTES - 1


class Recorded(Protocol):
    """How gradients are recorded of a call that is like one before."""

    @property
    def deterministic(self) -> bool | None:
        """What torch's switch must say, where the call followed it."""

    def call(self, found: Found, given: Sequence[Any]) -> Sequence[Any]:
        """The results of a call on these arguments."""


class _Replay(NamedTuple):
    """A call that was made before."""

    #: Whether tensors are as they were then.
    matches: Callable[..., bool]
    #: The tensors among the arguments, in the order in which the call takes them.
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    #: Where arguments were the same tensor as others.
    same: tuple[tuple[int, int], ...]
    #: Of the address of each; those of other alignments may need other kernels.
    low_bits: list[int]
    #: Whether gradients by one of them are wanted as soon as torch records any.
    requires_grad: bool
    #: What autocast made of tensors, where it was on: a tensor that is none of these would be cast.
    autocast: tuple[str, torch.dtype] | None
    target: Target
    framework: Framework
    call: Call
    #: How gradients are recorded, where they are wanted.
    recorded: Recorded | None

    def is_right_now(self) -> bool:
        """Whether torch's switches that tensors do not show are where they were."""
        if self.requires_grad and torch.is_grad_enabled() != (self.recorded is not None):
            return False
        if self.autocast is not None and torch.get_autocast_dtype(self.autocast[0]) != self.autocast[1]:
            return False
        return self.recorded is None or self.recorded.deterministic in (None, _is_deterministic())


_replays: dict[Any, tuple[_Replay, ...]] = {}


def replayed(key: CallKey) -> Sequence[Any] | None:
    """The results of a call, where there was one like it; gradients are recorded where they are wanted."""
    if _is_compiling():
        return None
    given, options = key
    try:
        replays = _replays.get(_lookup_key(given, options), ())
    except (AttributeError, TypeError, RuntimeError):
        # No tensors, nested ones, or something that is no constant, such as a list.
        return None
    for replay in replays:
        matches, pick, same, bits, requires_grad, autocast, target, framework, call, recorded = replay
        tensors = pick(given)
        if matches(*tensors) and (not same or all([given[i] is given[j] for i, j in same])):  # noqa: C419 (quicker)
            pointers = [x.data_ptr() for x in tensors]
            if [pointer & _LOW for pointer in pointers] == bits and (
                not (requires_grad or autocast) or replay.is_right_now()
            ):
                if replay is not replays[0]:
                    _to_front(_lookup_key(given, options), replay, replays)
                target.check()
                if recorded is not None:
                    return recorded.call((target, call, framework, tensors, pointers, ()), given)
                return call.run(target, framework, tensors[0], pointers, None)
    return None


def remember(
    key: CallKey,
    parts: Sequence[Part],
    wanted: Collection[str] = RESULTS,
    recorded: Recorded | None = None,
) -> None:
    """Keeps the launches of a call for later calls with the same key.

    Of all that they make, later calls return the ``wanted`` results alone. Where gradients were ``recorded``, they
    will be again; where not, nobody wanted any.
    """
    given, options = key
    if _Guards is None or not _is_constant(options):
        return
    try:
        place = _lookup_key(given, options)
        known = _replays.get(place, ())
    except (AttributeError, TypeError):
        return
    arrays = taken(parts)
    places = {id(x): i for i, x in reversed(list(enumerate(given))) if x is not None}
    if places.keys() != {id(x) for x in arrays}:
        # Something was copied or made for the call, as it has to be each time.
        return
    same = tuple((places[id(x)], i) for i, x in enumerate(given) if x is not None and places[id(x)] != i)
    target, _, framework, *_ = parts[0][0]
    sizes, strides = [list(x.shape) for x in arrays], [list(x.stride()) for x in arrays]
    replay = _Replay(
        _Guards(*arrays, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check,
        itemgetter(*(places[id(x)] for x in arrays)),
        same,
        [x.data_ptr() & _LOW for x in arrays],
        any(x.requires_grad for x in arrays),
        _autocast(arrays[0].device.type),
        *(target, framework, joined(parts, wanted)),
        recorded,
    )
    if len(_replays) >= _KEYS_KEPT:
        _replays.clear()
    _to_front(place, replay, known)


def _lookup_key(given: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Equal for calls that differ at most in what tensors they have; True and 1 are not the same.

    Of these the shapes of two, so that there are few calls with one key.
    """
    return options, given[0].shape, given[1].shape, *map(type, options), *map(type, given)


def _autocast(device: str) -> tuple[str, torch.dtype] | None:
    """What autocast makes of tensors of a device, where it is on."""
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _is_constant(option: Any) -> bool:
    """Whether an option stays what it is; a number in a tensor may change."""
    if isinstance(option, tuple):
        return all(map(_is_constant, option))
    return option is None or isinstance(option, (str, Number, torch.dtype))


def _to_front(place: Any, replay: _Replay, replays: tuple[_Replay, ...]) -> None:
    """Calls that come often are found soon; what other threads did meanwhile may be forgotten, and is done again."""
    others = [other for other in replays if other is not replay]
    _replays[place] = (replay, *others[: _CALLS_KEPT - 1])


def forget_host() -> None:
    """Forgets the calls that the emulator ran."""
    for key, replays in list(_replays.items()):
        _replays[key] = tuple(replay for replay in replays if not replay.target.on_host)
