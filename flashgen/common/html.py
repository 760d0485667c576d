"""Elements of HTML and SVG, from the tree of the standard library, which escapes every text and attribute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring


def element(tag: str, *children: Element | str, **attributes: object) -> Element:
    """An element; ``class_`` is the attribute class, and ``stroke_width`` is stroke-width."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    append(made, children)
    return made


def append(parent: Element, children: Iterable[Element | str]) -> None:
    """Put elements and texts behind what the parent holds."""
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + child
        else:
            parent.text = (parent.text or "") + child


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Element:
    """A table whose first cells head their rows; columns of numbers are aligned as such."""
    body = list(rows)
    numbers = [bool(body) and all(_is_number(row[place]) for row in body) for place in range(len(heads))]
    head = zip(heads, numbers, strict=True)
    made = element("table")
    if caption:
        SubElement(made, "caption").text = caption
    made.append(element("thead", element("tr", *(_cell("th", text, right, scope="col") for text, right in head))))
    made.append(element("tbody", *(_row(row, numbers) for row in body)))
    return made


def markup(made: Element) -> str:
    """The element as HTML."""
    return tostring(made, encoding="unicode", method="html")


def _row(row: Sequence[str], numbers: Sequence[bool]) -> Element:
    first, *others = row
    cells = (_cell("td", text, right) for text, right in zip(others, numbers[1:], strict=True))
    return element("tr", _cell("th", first, False, scope="row"), *cells)


def _cell(tag: str, text: str, is_number: bool, **attributes: object) -> Element:
    return element(tag, text, **attributes, **({"class_": "number"} if is_number else {}))


def _is_number(text: str) -> bool:
    """Also what stands for a number that is not there."""
    return text[:1].isdigit() or text in ("-", "")


def _text(value: object) -> str:
    """Coordinates need two digits behind the point, and no more."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
