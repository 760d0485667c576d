"""Where packed rows begin and end, as far as it lies on the host: looked at before every call, since values change."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashgen.errors import ArgumentError


class Offsets(NamedTuple):
    """One array of 32-bit offsets among the arrays of a call, and what its values have to be."""

    #: What people call it, and the number that limits lengths.
    label: str
    limit: str
    #: Which of the addresses of a call is that of the array.
    place: int
    entries: int
    #: No sequence has more rows.
    longest: int
    #: The array whose rows are counted, and how many it has; None where offsets count no rows of an array.
    rows: tuple[str, int] | None

    def check(self, addresses: Sequence[int]) -> None:
        """ArgumentError for values that say no offsets."""
        if not self.entries:
            return
        values = (ctypes.c_int32 * self.entries).from_address(addresses[self.place])[:]
        problem = next(self._problems(values), None)
        if problem is not None:
            raise ArgumentError(problem)

    def moved(self, order: Sequence[int]) -> Offsets:
        """The same in a call that hands the i-th of its addresses over as number ``order[i]``."""
        return self._replace(place=order[self.place])

    def _problems(self, values: Sequence[int]) -> Iterator[str]:
        label, last = self.label, len(values) - 1
        if values[0] < 0:
            yield f"{label}[0]={values[0]} is negative; pass the row where the first sequence begins, mostly 0"
        for i, (first, end) in enumerate(itertools.pairwise(values)):
            if end < first:
                yield (
                    f"{label}[{i + 1}]={end} is below {label}[{i}]={first}; offsets must not decrease: pass the "
                    "running sum of the lengths"
                )
            if end - first > self.longest:
                yield (
                    f"sequence {i} of {label} has {end - first} rows, more than {self.limit}={self.longest}; pass the "
                    "length of the longest sequence"
                )
        if self.rows is not None and values[-1] > self.rows[1]:
            name, count = self.rows
            yield (
                f"{label}[{last}]={values[-1]} passes the end of {name}, which has {count} rows; the last offset is at "
                f"most {count}"
            )
