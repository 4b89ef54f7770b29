"""Places of a model's parameters in pretrained folders."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Excerpt:
    """A parameter that is a slice of a pretrained tensor.

    first: the slice's first row in that tensor. rows: number of rows of the whole tensor.
    """

    name: str
    first: int
    rows: int


@dataclass(frozen=True)
class Stack:
    """A parameter [n, rows, ...] that is a stack of pretrained tensors.

    names: for each of the n entries, the names of the tensors that are concatenated along the rows. All these tensors
    have the same number of rows.
    """

    names: tuple[tuple[str, ...], ...]


Place = str | Excerpt | Stack


def names_at(place: Place) -> set[str]:
    """Return the names of the pretrained tensors that a place refers to."""
    if isinstance(place, Stack):
        return {name for parts in place.names for name in parts}
    return {place if isinstance(place, str) else place.name}


@dataclass(frozen=True)
class Source:
    """A folder of pretrained safetensors weights for some of a model's parameters. Parameter names are canonical."""

    folder: Path
    place: Callable[[str, set[str]], Place]  # (parameter, names in the folder) -> place of the parameter
    covers: Callable[[str], bool] = lambda name: True
    of_model: bool = False  # True: an earlier run's weights; the model must use all of them, and checkpoints store them
