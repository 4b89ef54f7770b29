"""The frame of a picture in SVG."""

from __future__ import annotations

from collections.abc import Iterable


def picture(width: int, height: int, parts: Iterable[str], font_size: int = 12) -> str:
    """A white picture of so many pixels with `parts` on it: elements, in which text is escaped already."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{font_size}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    return "\n".join([*lines, *parts, "</svg>"]) + "\n"
