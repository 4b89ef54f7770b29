"""Pictures of coloured shapes on a 3 x 3 grid, and questions about them."""

import io
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (235, 215, 50),
    "purple": (160, 60, 200), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
NUMBERS = ("zero", "one", "two", "three", "four")
CELL = 16  # pixels; a picture has 3 x 3 cells

Kind = tuple[str, str]  # (colour, shape)
COMBINATIONS: list[Kind] = list(itertools.product(COLOURS, SHAPES))
NOVEL = [("red", "cross"), ("green", "circle"), ("blue", "triangle"), ("yellow", "square")]  # only in the split `novel`
KNOWN = [c for c in COMBINATIONS if c not in NOVEL]


def _every_fifth(items: list[Any]) -> frozenset[Any]:
    """Return a fifth of the items, chosen by a fixed shuffle."""
    order = np.random.default_rng(0).permutation(len(items))
    return frozenset(items[i] for i in order[: len(items) // 5])


# Held out from training: a fifth of the pairs of kinds that share a picture, and a fifth of the sets of occupied cells.
HELD_PAIRS = _every_fifth([frozenset(pair) for pair in itertools.combinations(KNOWN, 2)])
HELD_LAYOUTS = _every_fifth([frozenset(c) for n in (2, 3, 4) for c in itertools.combinations(range(9), n)])


@dataclass(frozen=True)
class Thing:
    """A shape in a cell; cells are numbered from 0, row by row."""

    colour: str
    shape: str
    cell: int
    large: bool

    @property
    def row(self) -> int:
        return self.cell // 3

    @property
    def column(self) -> int:
        return self.cell % 3

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


Scene = list[Thing]


def draw_scene(split: str, rng: np.random.Generator, least: int, most: int) -> Scene:
    """Draw a random scene for a split, with `least` to `most` things of different kinds.

    Scenes of `train` have no held-out layout or pair. Scenes of `val` and `test` have both, so they need at least two
    things. Scenes of `novel` have one thing with a combination of colour and shape that never occurs in training.
    """
    number = int(rng.integers(least, most + 1))  # drawn once, because redrawing the number would bias the counts
    while True:
        cells = rng.choice(9, number, replace=False)
        kinds = [KNOWN[i] for i in rng.choice(len(KNOWN), number, replace=False)]
        if split == "novel":
            kinds[0] = NOVEL[rng.integers(len(NOVEL))]
        held_layout = frozenset(map(int, cells)) in HELD_LAYOUTS
        held_pair = any(frozenset(pair) in HELD_PAIRS for pair in itertools.combinations(kinds, 2))
        if split == "novel" or (held_layout, held_pair) == ((split != "train",) * 2):
            return [Thing(*kind, int(cell), bool(rng.integers(2))) for kind, cell in zip(kinds, cells, strict=True)]


def render(scene: Scene, rng: np.random.Generator) -> bytes:
    """Render the scene as a JPEG with a grey background, shapes slightly off the centers of their cells, and noise."""
    ground = int(rng.integers(80, 140))
    image = Image.new("RGB", (3 * CELL, 3 * CELL), (ground, ground, ground))
    draw = ImageDraw.Draw(image)
    for thing in scene:
        r = 6 if thing.large else 4
        x = thing.column * CELL + CELL // 2 + int(rng.integers(-1, 2))
        y = thing.row * CELL + CELL // 2 + int(rng.integers(-1, 2))
        _draw(draw, thing.shape, x, y, r, COLOURS[thing.colour])
    noisy = np.asarray(image, np.float32) + rng.normal(0, 6, (3 * CELL, 3 * CELL, 3))
    out = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=92, subsampling=0)
    return out.getvalue()


def _draw(draw: ImageDraw.ImageDraw, shape: str, x: int, y: int, r: int, colour: tuple[int, int, int]) -> None:
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        draw.rectangle((x - r + 1, y - r + 1, x + r - 1, y + r - 1), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        draw.rectangle((x - r, y - 1, x + r, y + 1), fill=colour)
        draw.rectangle((x - 1, y - r, x + 1, y + r), fill=colour)


def describe(scene: Scene, rng: np.random.Generator) -> dict[str, Any]:
    """Return the scene's annotation: a caption in row order, questions with answers, and a three-turn conversation.

    Questions refer to a thing by properties that are unique in the picture. Yes and no are equally likely answers.
    """
    questions = [_q("count", "how many things are there", NUMBERS[len(scene)])]
    for thing in scene:
        if sum(t.shape == thing.shape for t in scene) == 1:
            questions.append(_q("colour", f"what colour is the {thing.shape}", thing.colour))
        if sum(t.colour == thing.colour for t in scene) == 1:
            questions.append(_q("shape", f"what shape is {thing.colour}", thing.shape))
    for thing in scene:
        questions += [
            _q("where", f"where is the {thing}", _place(thing)),
            _q("what", f"what is {_place(thing)}", str(thing)),
        ]
    for kind, axis in (("above", "row"), ("left", "column")):
        pairs = [(a, b) for a, b in itertools.combinations(scene, 2) if getattr(a, axis) != getattr(b, axis)]
        questions += [_relation(kind, axis, *pairs[i], rng) for i in rng.permutation(len(pairs))[:3]]
    by_columns = sorted(scene, key=lambda t: (t.column, t.row))
    columns = " , ".join(f"{COLUMNS[t.column]} {ROWS[t.row]} {t}" for t in by_columns)
    questions.append(_q("columns", "describe the columns", columns))
    caption = " , ".join(f"{t} {_place(t)}" for t in sorted(scene, key=lambda t: t.cell))
    return {"caption": caption, "questions": questions, "conversations": _conversation(scene, rng)}


def _place(thing: Thing) -> str:
    return f"{ROWS[thing.row]} {COLUMNS[thing.column]}"


def _q(kind: str, question: str, answer: str) -> dict[str, str]:
    return {"kind": kind, "question": question, "answer": answer}


def _relation(kind: str, axis: str, a: Thing, b: Thing, rng: np.random.Generator) -> dict[str, str]:
    if rng.integers(2):
        a, b = b, a
    word = "above" if kind == "above" else "left of"
    return _q(kind, f"is the {a} {word} the {b}", "yes" if getattr(a, axis) < getattr(b, axis) else "no")


def _conversation(scene: Scene, rng: np.random.Generator) -> list[dict[str, str]]:
    """Return turns that build on each other: `it` refers to the subject of the previous question."""
    thing = scene[rng.integers(len(scene))]
    return [
        {"from": "human", "value": "how many things are there"},
        {"from": "gpt", "value": NUMBERS[len(scene)]},
        {"from": "human", "value": f"where is the {thing}"},
        {"from": "gpt", "value": _place(thing)},
        {"from": "human", "value": "is it large or small"},
        {"from": "gpt", "value": "large" if thing.large else "small"},
    ]


def words() -> list[str]:
    """Return every word of the annotations, in a fixed order."""
    phrases = [
        "how many things are there what colour shape is the left of above describe image columns",
        "where it large or small yes no ,", *NUMBERS, *ROWS, *COLUMNS, *COLOURS, *SHAPES,
    ]  # fmt: skip
    return list(dict.fromkeys(" ".join(phrases).split()))
