"""What a call brings beside its tensors: scales, which pairs are dropped, where packed or cached sequences lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.offsets import Offsets
from flashgen.launch.call.packing import Value
from flashgen.launch.call.scales import NO_SCALES, GivenScales, Scales, check_input_scales
from flashgen.launch.kvcache.cache_arrays import GivenArrays, check_cache
from flashgen.launch.kvcache.scales import check_scales
from flashgen.plan.dropout import NUMBERS, STATE
from flashgen.plan.model.params import INPUT_SCALES
from flashgen.plan.varlen import COUNTS, STARTS
from flashgen.spec import AttentionSpec, Dropout, KVCache, Sequences

#: The array with which a backward call reads P.
P = "p"
#: How many Sides are remembered per kernel.
_SIDES_KEPT = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """What the side arguments of a call settle, all but addresses and what else changes with every call.

    Calls that settle the same share one object, by which they are then looked up.
    """

    #: The arrays that are given, and their places.
    names: tuple[str, ...] = ()
    #: Parameters by name.
    values: tuple[tuple[str, float], ...] = ()
    #: Queries and keys of the longest of packed sequences.
    longest: tuple[int, int] = (0, 0)
    #: How many splits of the keys of a cache are asked for.
    num_splits: int = 0
    #: Whether the result of a sequence may not depend on the others.
    batch_invariant: bool = False
    #: What scales that are numbers multiply logits by.
    factor: float = 1.0

    @property
    def parameters(self) -> dict[str | None, Value]:
        """The parameters, with those that every call brings left blank."""
        return {**dict(self.values), **dict.fromkeys(NUMBERS, 0)}

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of an element of each array but P, which has the dtype of the spec."""
        return tuple(8 if name == STATE else 4 for name in self.names)


NOTHING = Side()
#: The Side of a call, its arrays, and the numbers that it brings as it does addresses.
Brought = tuple[Side, tuple[Any, ...], tuple[int, ...]]


class SideArguments:
    """Those that calls of one spec bring."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._has_dropout, self._is_packed = spec.dropout, spec.varlen
        self._has_scales = spec.element.is_eight_bit
        #: Whether calls may bring arrays.
        self.takes_arrays = spec.dropout or spec.varlen or spec.cache is not None or self._has_scales
        self.number_names: tuple[str, ...] = NUMBERS if spec.dropout else ()
        self._cache_arrays = GivenArrays(spec)
        self._sides: dict[Hashable, Side] = {}

    def of(
        self,
        dropout: Dropout | None,
        sequences: Sequences | None,
        cache: KVCache | None = None,
        stored: Any = None,
        scales: Scales = NO_SCALES,
    ) -> Brought:
        """The side arguments of a call; ``stored`` is P, if a backward call reads one."""
        if scales is not NO_SCALES and not self._has_scales:
            raise ArgumentError(
                "q_scale, k_scale and v_scale are for kernels built with dtype='e4m3'; leave them out, or build one"
            )
        if self._spec.cache or cache is not None:
            return self._cached(cache, scales)
        names: tuple[str, ...] = ()
        arrays: tuple[Any, ...] = ()
        numbers: tuple[int, ...] = ()
        longest, p = (0, 0), None
        if dropout is not None or self._has_dropout:
            dropout = self._checked_dropout(dropout)
            p, numbers = dropout.p, (dropout.seed, dropout.offset)
            if dropout.state is not None:
                names, arrays = (STATE,), (dropout.state,)
        if sequences is not None or self._is_packed:
            sequences = self._checked_sequences(sequences)
            longest = sequences.max_seqlen_q, sequences.max_seqlen_k
            names, arrays = names + STARTS, (*arrays, sequences.cu_seqlens_q, sequences.cu_seqlens_k)
            if sequences.seqused_q is not None:
                names, arrays = (*names, COUNTS[0]), (*arrays, sequences.seqused_q)
            if sequences.seqused_k is not None:
                names, arrays = (*names, COUNTS[1]), (*arrays, sequences.seqused_k)
        if stored is not None:
            names, arrays = (*names, P), (*arrays, stored)
        factors = None
        if self._has_scales:
            given = GivenScales.of(scales)
            names, arrays, factors = names + given.names, arrays + given.arrays, given.factors
        key = names, longest, p, factors
        side = self._sides.get(key)
        if side is None:
            values = () if dropout is None else _drops(dropout)
            values += () if factors is None else given.values
            side = self._remembered(key, Side(names, values, longest, factor=1.0 if factors is None else factors[0]))
        return side, arrays, numbers

    def _cached(self, cache: KVCache | None, scales: Scales) -> Brought:
        if not self._spec.cache:
            raise ArgumentError(
                "cache was given, but this kernel was built without; build one with cache='contiguous' or 'paged'"
            )
        names, arrays = self._cache_arrays.of(cache)
        assert cache is not None, "None is no cache"
        factor = 1.0
        if scales is not NO_SCALES:
            of_queries = GivenScales.of_queries(scales)
            names, arrays, factor = names + of_queries.names, arrays + of_queries.arrays, of_queries.factors[0]
        key = names, cache.appended, cache.num_splits, cache.max_seqlen_q, cache.batch_invariant, factor
        side = self._sides.get(key)
        if side is None:
            values = (("appended", cache.appended),)
            how = cache.num_splits, cache.batch_invariant, factor
            side = self._remembered(key, Side(names, values, (cache.max_seqlen_q, 0), *how))
        return side, arrays, ()

    def _remembered(self, key: Hashable, side: Side) -> Side:
        """The one that calls with this key share, whichever thread made it first."""
        if len(self._sides) >= _SIDES_KEPT:
            self._sides.clear()
        return self._sides.setdefault(key, side)

    def _checked_dropout(self, dropout: Dropout | None) -> Dropout:
        if not self._has_dropout:
            raise ArgumentError("dropout was given, but this kernel was built without; build one with dropout=True")
        if not isinstance(dropout, Dropout):
            raise ArgumentError(
                f"dropout={show(dropout)}: this kernel was built with dropout=True; "
                "pass dropout=flashgen.Dropout(p, seed)"
            )
        return dropout

    def _checked_sequences(self, sequences: Sequences | None) -> Sequences:
        if not self._is_packed:
            raise ArgumentError("sequences was given, but this kernel was built without; build one with varlen=True")
        if not isinstance(sequences, Sequences):
            raise ArgumentError(
                f"sequences={show(sequences)}: this kernel was built with varlen=True; "
                "pass sequences=flashgen.Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)"
            )
        return sequences

    def check(self, infos: Sequence[ArrayInfo], q: ArrayInfo, k: ArrayInfo) -> int:
        """How many packed or cached sequences there are; ArgumentError for arrays that kernels cannot read."""
        if self._spec.cache:
            batch = check_cache(infos, q, k)
            check_scales(self._spec, infos, batch, k, q)
            return batch
        shapes = {info.name: info.shape for info in infos}
        sequences = max((shapes.get(STARTS[0]) or (1,))[0] - 1, 0)
        check_input_scales(self._spec, infos, sequences, q, k)
        for info in infos:
            if info.name == P or info.name in INPUT_SCALES:
                continue
            name = f"dropout.{info.name.removeprefix('dropout_')}" if info.name == STATE else f"sequences.{info.name}"
            if info.device != q.device:
                raise ArgumentError(f"{name} is on {info.where}, and q on {q.where}; move it there")
            size = 2 if info.name == STATE else sequences + (info.name in STARTS)
            dtypes = ("int64", "uint64") if info.name == STATE else ("int32",)
            known = info.dtype.rpartition(".")[2] in dtypes
            if not known or info.shape != (size,) or (size > 1 and info.strides != (1,)):
                raise ArgumentError(f"{name} is {info.dtype} of shape {info.shape}; pass {size} contiguous {dtypes[0]}")
        return sequences


def _drops(dropout: Dropout) -> tuple[tuple[str, float], ...]:
    return ("dropout_below", dropout.dropped_below), ("dropout_factor", dropout.factor)


def offsets_of(side: Side, infos: Sequence[ArrayInfo], q: ArrayInfo, k: ArrayInfo, *, has_cache: bool) -> list[Offsets]:
    """Arrays of a call on the host that say where packed rows lie; of a cache, those of queries alone count rows."""
    owner, found = "cache" if has_cache else "sequences", []
    for place, info in enumerate(infos):
        if info.name not in STARTS:
            continue
        which = STARTS.index(info.name)
        label, limit, array = f"{owner}.{info.name}", f"max_seqlen_{'qk'[which]}", (q, k)[which]
        # The keys that a cache counts are no rows of an array.
        counts_rows = not (has_cache and which)
        longest = side.longest[which] if counts_rows else 2**31
        rows = (array.name, array.shape[1]) if counts_rows else None
        found.append(Offsets(label, limit, place, info.shape[0], longest, rows))
    return found
