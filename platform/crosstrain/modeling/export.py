"""A model's export: the files of a Hugging Face model folder beside the weights, and the parts that can be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from crosstrain.utils.files import write_json

if TYPE_CHECKING:
    from crosstrain.modeling.base import Model

ReadParameter = Callable[[str], Tensor]  # the whole value of a parameter, by its canonical name


@dataclass(frozen=True)
class Merge:
    """A parameter that export combines with others, which the exported folder then leaves out."""

    others: tuple[str, ...]  # canonical names
    combine: Callable[..., Tensor]  # of the parameter and the others, all fp32 and whole


# (prefixes, submodel): export strips the submodel's prefix from the names. Without a submodel, names and the
# configuration are kept.
Part = tuple[tuple[str, ...], "Model | None"]


class Export:
    """How a model is written for other programs. By default its options are its configuration."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def save_config(self, folder: Path) -> None:
        """Write the files that a Hugging Face model folder has besides the weights."""
        options = asdict(self.model.options)
        write_json(folder / "config.json", {"arch": type(self.model).__name__, **options})

    def save_parts(self, folder: Path, names: set[str], read: ReadParameter) -> None:
        """Write files made of the trained parameters `names` (canonical), which a checkpoint then holds too; none."""

    def parts(self) -> dict[str, Part]:
        """Parts that export can write by themselves; none."""
        return {}

    def merges(self) -> dict[str, Merge]:
        """Merges that export makes, by canonical name; none by default."""
        return {}
