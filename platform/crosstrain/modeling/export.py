"""Export of a model: the files of a Hugging Face model folder, and the parts that can be exported separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from crosstrain.utils.files import write_json

if TYPE_CHECKING:
    from crosstrain.modeling.base import Model

ReadParameter = Callable[[str], Tensor]  # canonical name of a parameter -> its whole value


@dataclass(frozen=True)
class Merge:
    """A parameter that export merges with other parameters; the others are left out of the exported folder."""

    others: tuple[str, ...]  # canonical names
    combine: Callable[..., Tensor]  # called with the parameter and the others, all fp32 and whole


# (prefixes, submodel): the parameters with these name prefixes. Export strips the submodel's prefix from the names.
# Without a submodel, the names and the configuration are kept.
Part = tuple[tuple[str, ...], "Model | None"]


class Export:
    """Writes a model for other programs. By default config.json holds the model's options."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def save_config(self, folder: Path) -> None:
        """Write the files of a Hugging Face model folder except for the weights."""
        options = asdict(self.model.options)
        write_json(folder / "config.json", {"arch": type(self.model).__name__, **options})

    def save_parts(self, folder: Path, names: set[str], read: ReadParameter) -> None:
        """Write extra files made from the trained parameters `names` (canonical) to an export or checkpoint folder."""

    def parts(self) -> dict[str, Part]:
        """Parts of the model that can be exported separately; none by default."""
        return {}

    def merges(self) -> dict[str, Merge]:
        """Canonical name -> merge, for the parameters that export merges; none by default."""
        return {}
