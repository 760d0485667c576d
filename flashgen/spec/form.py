"""One object for all masks, or scores, that are equal: what those who record programs know them by.

torch.compile compares objects by identity. A mask that is made anew for each batch, with other tensors, has the form
of the one before, so the program recorded with that one serves it too.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary


class Form:
    """What makes a mask or a score equal to another, as one object.

    Its name is a constant to every torch.compile, which not every object is. A name is never used twice.
    """

    __slots__ = ("__weakref__", "key", "name")

    def __init__(self, key: tuple[Any, ...], name: str) -> None:
        self.key, self.name = key, name

    def __reduce__(self) -> tuple[Any, ...]:
        return form_of, (self.key,)


_forms: WeakValueDictionary[tuple[Any, ...], Form] = WeakValueDictionary()
_named: WeakValueDictionary[str, Form] = WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.Lock()


def form_of(key: tuple[Any, ...]) -> Form:
    """The one form of a key."""
    with _lock:
        form = _forms.get(key)
        if form is None:
            form = _forms[key] = Form(key, f"form {next(_numbers)}")
            _named[form.name] = form
        return form


def form_named(name: str) -> Form:
    """The form of that name, which somebody still holds."""
    return _named[name]
