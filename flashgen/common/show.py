"""Values as error messages quote them: short, printable and on one line, whatever they are."""

from __future__ import annotations

import reprlib
from typing import Any

#: No text of ``show`` is longer.
LONGEST = 120
#: Paths are quoted whole, unless they leave no room for anything else.
LONGEST_PATH = 400
_LONGEST_INTEGER_BITS = 256


def show(value: object) -> str:
    """A short ``repr``. Values that cannot be printed, or not in short, are described."""
    try:
        return shortened(_text(value))
    except Exception:  # whatever a __repr__, a __class__ or a shape of someone else's raises
        return f"<a value of type {shortened(type(value).__name__, 60)}>"


def shortened(text: str, longest: int = LONGEST) -> str:
    """The text itself, or its begin and its end where it is longer than that."""
    if len(text) <= longest:
        return text
    end = (longest - 3) // 3
    return f"{text[: longest - 3 - end]}...{text[len(text) - end :]}"


def show_path(path: object) -> str:
    """A path without quotes."""
    return shortened(str(path), LONGEST_PATH)


def show_error(error: BaseException) -> str:
    """The type and the message of someone else's exception."""
    try:
        message = shortened(" ".join(str(error).split()), 3 * LONGEST)
    except Exception:
        message = "its message cannot be printed"
    return f"{shortened(type(error).__name__)}: {message}"


def _text(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        return f"<an integer of {value.bit_length()} bits>"
    if _is_array(value):
        return _array(value)
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    short.maxdict = short.maxlist = short.maxtuple = short.maxset = short.maxfrozenset = 6
    return " ".join(short.repr(value).split())


def _is_array(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype")


def _array(value: Any) -> str:
    """An array by its type, shape and elements' type: printing elements may take long, or wait for a GPU."""
    shape = tuple(value.shape)
    shown = str(shape) if len(shape) <= 8 else f"of {len(shape)} dimensions"
    return f"<{type(value).__name__} {shown} of {str(value.dtype).rsplit('.', 1)[-1]}>"
