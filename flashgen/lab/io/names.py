"""What tables call the arrays of a kernel."""

from __future__ import annotations

#: Counters, flags and the like, which the models leave out.
OTHERS = "counters and flags"
DQ_SUM = "dQ in float32"
#: By the name of a kernel's parameter.
_SHOWN = {
    "q": "Q",
    "qv": "Qv",
    "k": "K",
    "v": "V",
    "o": "O",
    "out": "O",
    "lse": "LSE",
    "do": "dO",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
    "dsum": "D",
    "dq_accum": DQ_SUM,
    "row_stats": "row stats",
    "scores": "S",
    "probabilities": "P",
    "p": "P",
    "dscores": "dS",
    "o_accum": "O in float32",
    "row_sums": "l",
    "row_maxima": "m",
    "tile_maxima": "maxima",
    "tile_sums": "sums",
    "tile_outputs": "O partials",
    "o_partial": "O partials",
    "row_partial": "sums",
}


def shown(parameter: str) -> str:
    """The name in tables of the array that a parameter points to."""
    return _SHOWN.get(parameter, OTHERS)
