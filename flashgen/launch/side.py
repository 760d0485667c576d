"""What a call brings beside its tensors: which pairs are dropped."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from flashgen.errors import ArgumentError
from flashgen.launch.array import ArrayInfo
from flashgen.launch.packing import Value
from flashgen.plan.dropout import NUMBERS, STATE
from flashgen.spec import AttentionSpec, Dropout

#: Bytes of an element of each array.
_ITEM_BYTES = {STATE: 8}


class Side(NamedTuple):
    """The side arguments of one call."""

    #: The arrays that are given, and their places.
    names: tuple[str, ...] = ()
    arrays: tuple[Any, ...] = ()
    #: What changes with every call, as addresses do.
    numbers: tuple[int, ...] = ()
    #: What else shapes the call, and the parameters that say so.
    key: Hashable = ()
    values: tuple[tuple[str, float], ...] = ()


NOTHING = Side()


class SideArguments:
    """Those that calls of one spec bring."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._has_dropout = spec.dropout
        #: The parameters that point to arrays, in the order in which a call hands over their addresses.
        self.places: tuple[str, ...] = (STATE,) if spec.dropout else ()
        self.number_names: tuple[str, ...] = NUMBERS if spec.dropout else ()

    def of(self, dropout: Dropout | None) -> Side:
        """The side arguments of a call."""
        if dropout is None and not self._has_dropout:
            return NOTHING
        if not isinstance(dropout, Dropout):
            raise ArgumentError(
                f"dropout={dropout!r}: this kernel was built with dropout=True; pass dropout=flashgen.Dropout(p, seed)"
            )
        if not self._has_dropout:
            raise ArgumentError("dropout was given, but this kernel was built without; build one with dropout=True")
        names, arrays = ((STATE,), (dropout.state,)) if dropout.state is not None else ((), ())
        values = (("dropout_below", dropout.dropped_below), ("dropout_factor", dropout.factor))
        return Side(names, arrays, (dropout.seed, dropout.offset), (dropout.p, names), values)

    def addresses(self, side: Side, pointers: Sequence[int]) -> tuple[int, ...]:
        """One for each place, 0 where there is no array."""
        given = dict(zip(side.names, pointers, strict=True))
        return tuple(given.get(place, 0) for place in self.places)

    def check(self, infos: Sequence[ArrayInfo], q: ArrayInfo) -> None:
        """ArgumentError for arrays that kernels cannot read."""
        for info in infos:
            if info.device != q.device:
                raise ArgumentError(f"dropout.state is on {info.where}, and q on {q.where}; move it there")
            if not info.dtype.endswith("int64") or info.shape != (2,) or info.strides != (1,):
                raise ArgumentError(
                    f"dropout.state is {info.dtype} of shape {info.shape}; pass two 64-bit integers, side by side"
                )

    def item_bytes(self, side: Side) -> tuple[int, ...]:
        """Bytes of an element of each array."""
        return tuple(_ITEM_BYTES[name] for name in side.names)


def packed_values(side: Side) -> dict[str | None, Value]:
    """The parameters, with those that every call brings left blank."""
    return {**dict(side.values), **dict.fromkeys(NUMBERS, 0)}
