"""HTML and SVG that cannot be broken out of: whatever is put into an element is escaped, unless it is one itself."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from crosstrain.errors import printable

_VOID = {"meta"}


class Html(str):
    """Markup that `tag` made. Any other text is text."""

    __slots__ = ()


def tag(name: str, /, *children: str | Iterable[str], **attributes: object) -> Html:
    """An element. `class_` stands for class, `data_name` for data-name; attributes that are None are left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{''.join(map(_inside, children))}</{name}>")


def verbatim(name: str, text: str) -> Html:
    """A `style` or `script` element with `text` of our own, which browsers read as it stands."""
    assert "</" not in text
    return Html(f"<{name}>{text}</{name}>")


def _inside(child: str | Iterable[str]) -> str:
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(printable(child))
    return "".join(map(_inside, child))
