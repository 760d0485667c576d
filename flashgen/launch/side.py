"""What a call brings beside its tensors: which pairs are dropped, and where packed or cached sequences lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from flashgen.errors import ArgumentError
from flashgen.launch.array import ArrayInfo
from flashgen.launch.cache_arrays import check_cache, given_arrays
from flashgen.launch.packing import Value
from flashgen.plan.cache import cache_arrays
from flashgen.plan.dropout import NUMBERS, STATE
from flashgen.plan.varlen import COUNTS, STARTS
from flashgen.spec import AttentionSpec, Dropout, KVCache, Sequences


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
    #: Queries and keys of the longest of packed sequences.
    longest: tuple[int, int] = (0, 0)
    #: How many splits of the keys of a cache are asked for.
    num_splits: int = 0

    @property
    def parameters(self) -> dict[str | None, Value]:
        """The parameters, with those that every call brings left blank."""
        return {**dict(self.values), **dict.fromkeys(NUMBERS, 0)}

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of an element of each array."""
        return tuple(8 if name == STATE else 4 for name in self.names)


NOTHING = Side()


class SideArguments:
    """Those that calls of one spec bring."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._has_dropout, self._is_packed = spec.dropout, spec.varlen
        #: The parameters that point to arrays, in the order in which a call hands over their addresses.
        self.places: tuple[str, ...] = (STATE,) * spec.dropout + (*STARTS, *COUNTS) * spec.varlen
        if spec.cache:
            self.places += cache_arrays(spec)
        self._picks: dict[tuple[str, ...], Callable[[Sequence[int]], tuple[int, ...]]] = {}
        self.number_names: tuple[str, ...] = NUMBERS if spec.dropout else ()

    def of(self, dropout: Dropout | None, sequences: Sequences | None, cache: KVCache | None = None) -> Side:
        """The side arguments of a call."""
        if dropout is None and sequences is None and cache is None and not self.places:
            return NOTHING
        if self._spec.cache or cache is not None:
            return self._cached(cache)
        drop, packed = self._dropped(dropout), self._packed(sequences)
        if drop is NOTHING or packed is NOTHING:
            return packed if drop is NOTHING else drop
        return drop._replace(
            names=drop.names + packed.names,
            arrays=drop.arrays + packed.arrays,
            key=(drop.key, packed.key),
            longest=packed.longest,
        )

    def _dropped(self, dropout: Dropout | None) -> Side:
        if not self._has_dropout:
            if dropout is not None:
                raise ArgumentError("dropout was given, but this kernel was built without; build one with dropout=True")
            return NOTHING
        if not isinstance(dropout, Dropout):
            raise ArgumentError(
                f"dropout={dropout!r}: this kernel was built with dropout=True; pass dropout=flashgen.Dropout(p, seed)"
            )
        names, arrays = ((STATE,), (dropout.state,)) if dropout.state is not None else ((), ())
        values = (("dropout_below", dropout.dropped_below), ("dropout_factor", dropout.factor))
        return Side(names, arrays, (dropout.seed, dropout.offset), (dropout.p, names), values)

    def _packed(self, sequences: Sequences | None) -> Side:
        if not self._is_packed:
            if sequences is not None:
                raise ArgumentError(
                    "sequences was given, but this kernel was built without; build one with varlen=True"
                )
            return NOTHING
        if not isinstance(sequences, Sequences):
            raise ArgumentError(
                f"sequences={sequences!r}: this kernel was built with varlen=True; pass sequences=flashgen.Sequences"
                "(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)"
            )
        names: tuple[str, ...] = STARTS
        arrays: tuple[Any, ...] = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        for name, array in zip(COUNTS, (sequences.seqused_q, sequences.seqused_k), strict=True):
            if array is not None:
                names, arrays = (*names, name), (*arrays, array)
        longest = sequences.max_seqlen_q, sequences.max_seqlen_k
        return Side(names, arrays, key=(names, longest), longest=longest)

    def _cached(self, cache: KVCache | None) -> Side:
        if not self._spec.cache:
            raise ArgumentError(
                "cache was given, but this kernel was built without; build one with cache='contiguous' or 'paged'"
            )
        names, arrays = given_arrays(self._spec, cache)
        assert cache is not None, "given_arrays refuses None"
        values, longest = (("appended", cache.appended),), (cache.max_seqlen_q, 0)
        key = names, values, cache.num_splits, longest
        return Side(names, arrays, key=key, values=values, longest=longest, num_splits=cache.num_splits)

    def addresses(self, side: Side, pointers: Sequence[int]) -> tuple[int, ...]:
        """One for each place, 0 where there is no array."""
        pick = self._picks.get(side.names)
        if pick is None:
            # The last one is the 0 behind the addresses that there are.
            order = [side.names.index(place) if place in side.names else -1 for place in self.places]
            pick = self._picks[side.names] = itemgetter(*order) if len(order) > 1 else lambda given: (given[order[0]],)
        return pick((*pointers, 0))

    def check(self, infos: Sequence[ArrayInfo], q: ArrayInfo, k: ArrayInfo) -> int:
        """How many packed or cached sequences there are; ArgumentError for arrays that kernels cannot read."""
        if self._spec.cache:
            return check_cache(infos, q, k)
        shapes = {info.name: info.shape for info in infos}
        sequences = max((shapes.get(STARTS[0]) or (1,))[0] - 1, 0)
        for info in infos:
            name = f"dropout.{info.name.removeprefix('dropout_')}" if info.name == STATE else f"sequences.{info.name}"
            if info.device != q.device:
                raise ArgumentError(f"{name} is on {info.where}, and q on {q.where}; move it there")
            size = 2 if info.name == STATE else sequences + (info.name in STARTS)
            dtypes = ("int64", "uint64") if info.name == STATE else ("int32",)
            known = info.dtype.rpartition(".")[2] in dtypes
            if not known or info.shape != (size,) or (size > 1 and info.strides != (1,)):
                wanted = f"{size} integers of {dtypes[0].removeprefix('int')} bits, side by side"
                raise ArgumentError(f"{name} is {info.dtype} of shape {info.shape}; pass {wanted}")
        return sequences


def check_on_host(side: Side) -> None:
    """What kernels take on trust, where it can be looked at: starts that go up, and no sequence above the longest."""
    import numpy as np

    given = dict(zip(side.names, side.arrays, strict=True))
    for name, most in zip(STARTS, side.longest, strict=True):
        lengths = np.diff(np.asarray(given.get(name, ())))
        if lengths.size and (lengths.min() < 0 or lengths.max() > most or given[name][0] < 0):
            raise ArgumentError(f"sequences.{name} has lengths {lengths.tolist()}; its maximum allows 0 to {most}")
