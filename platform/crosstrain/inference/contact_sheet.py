"""A picture of pictures: what was asked about each, what was answered, what is true."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from crosstrain.inference.vqa import Answer
from crosstrain.utils.optional_deps import require

_SIDE, _COLUMNS = 144, 6  # pixels of a picture, pictures to a row
_LINES, _WIDTH, _HEIGHT = 2, 24, 13  # lines of each text, letters to a line, pixels of a line
_TEXT = 3 * _LINES * _HEIGHT + 8  # pixels below a picture
TILE = (_SIDE + 8, _SIDE + _TEXT)


def contact_sheet(shown: list[tuple[Answer, Any]], path: Path) -> None:
    """Write the answers, each with its PIL image, as one picture: green is right, red wrong, grey below it the truth.

    Long texts are cut; the predictions in JSON have all of them.
    """
    image, draw_module = require("PIL.Image", "--sheet"), require("PIL.ImageDraw", "--sheet")
    rows = max(1, -(-len(shown) // _COLUMNS))
    sheet = image.new("RGB", (_COLUMNS * TILE[0], rows * TILE[1]), "white")
    draw = draw_module.Draw(sheet)
    for i, (answer, picture) in enumerate(shown):
        x, y = i % _COLUMNS * TILE[0] + 4, i // _COLUMNS * TILE[1]
        sheet.paste(picture.resize((_SIDE, _SIDE), image.NEAREST), (x, y + 2))
        y += _SIDE + 4
        said = (answer.text or "(nothing)", "darkgreen" if answer.right else "red")
        for text, colour in ((_asked(answer.question), "black"), said, (answer.truth, "grey")):
            for line in textwrap.wrap(text, _WIDTH, max_lines=_LINES, placeholder=" ..."):
                draw.text((x, y), line, fill=colour)
                y += _HEIGHT
    sheet.save(path)


def _asked(question: str) -> str:
    return question.replace("<image>", "").strip()
