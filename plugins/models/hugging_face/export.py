"""Export of the configuration files of transformers' causal language models."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from crosstrain import DataError, Export
from crosstrain.utils.assets import GENERATION_CONFIG, copy_files, plain_files

if TYPE_CHECKING:
    from .base import TransformersModel


class TransformersExport(Export):
    """Exports the configuration without padding, and the generation settings of the pretrained model."""

    model: TransformersModel

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self._generation: list[Path] = []
        if model.source is not None:
            with suppress(DataError):  # a link out of the folder is not copied; the model itself is fine
                self._generation = plain_files(model.source, {GENERATION_CONFIG})

    def save_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.model.config)
        lm = self.model.lm
        config.architectures = [type(lm).__name__]
        config.dtype = next((p.dtype for p in lm.parameters() if p.requires_grad), config.dtype)  # dtype of the weights
        config.save_pretrained(folder)
        copy_files(self._generation, folder)
