"""A contact sheet: images in rows, each with a few lines of text."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosstrain import require

_SIDE, _COLUMNS = 144, 6  # pixels of an image's side, images per row
_LINES, _WIDTH, _HEIGHT = 2, 24, 13  # lines per text, characters per line, pixels per line
TILE = (_SIDE + 8, _SIDE + 3 * _LINES * _HEIGHT + 8)  # pixels of an image with its texts


def contact_sheet(tiles: Sequence[tuple[Any, Sequence[tuple[str, str]]]], path: Path) -> None:
    """Draw PIL images in rows, each with up to six colored texts below it. Long texts are cut."""
    image, draw_module = require("PIL.Image", "--sheet"), require("PIL.ImageDraw", "--sheet")
    rows = max(1, -(-len(tiles) // _COLUMNS))
    sheet = image.new("RGB", (_COLUMNS * TILE[0], rows * TILE[1]), "white")
    draw = draw_module.Draw(sheet)
    for i, (picture, texts) in enumerate(tiles):
        x, y = i % _COLUMNS * TILE[0] + 4, i // _COLUMNS * TILE[1]
        sheet.paste(picture.resize((_SIDE, _SIDE), image.NEAREST), (x, y + 2))
        y += _SIDE + 4
        for words, colour in texts:
            most = max(1, min(_LINES, 3 * _LINES // len(texts)))
            for line in textwrap.wrap(words, _WIDTH, max_lines=most, placeholder=" ..."):
                draw.text((x, y), line, fill=colour)
                y += _HEIGHT
    sheet.save(path)
